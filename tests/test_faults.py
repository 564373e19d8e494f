"""Every injected fault is a wrong verdict that names its tensor; a hundred honest cells are none."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from probes.parity.steps import Recorded, Schedule, Verdicts, record, reference, verdicts
from tests import faults
from tests.conftest import ROOT
from tests.faults import FAULTS, LONG, REMOVED, Faulty, SmallLM

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = Schedule(steps=2)
Step = Callable[..., tuple[Tensor, Tensor]]
PAGE = ROOT / "probes" / "parity" / "FAULTS.md"


class Bench:
    """One model in one dtype at one length: reference and eager once, the faulty compiler again and again."""

    def __init__(self, model: SmallLM, faulty: Faulty, compiled: Step, dtype: torch.dtype, seq: int) -> None:
        self.model, self.faulty, self.compiled, self.dtype = model, faulty, compiled, dtype
        self.scale = 1024.0 if dtype == torch.float16 else 1.0
        self.batches = faults.batches(2, seq)
        self.ruler = reference(copy.deepcopy(model).double(), self.batches, STEPS, scale=self.scale)
        self.eager = self._record(model)

    def _record(self, model: Step) -> Recorded:
        return record(model, self.model, self.batches, STEPS, scale=self.scale)

    def candidate(self, fault: faults.Fault | None) -> Recorded:
        self.faulty.begin(fault)
        return self._record(self.compiled)

    def judge(self, candidate: Recorded) -> Verdicts:
        return verdicts(
            candidate, self.eager, self.eager, self.ruler, dtype=self.dtype, reference_name="float64"
        )


def _mask(side: Recorded) -> None:
    """As a model does that fills the logits of padded vocabulary with minus infinity."""
    for name in side.outputs:
        if name.endswith("output"):
            side.outputs[name][..., -8:] = -torch.inf


@functools.cache
def compiled_once(dtype: str) -> tuple[SmallLM, Faulty, Step]:
    """Two graphs a dtype: one length, then any. `torch._dynamo.reset` would compile all of them again."""
    torch.manual_seed(0)
    model, faulty = SmallLM(DTYPES[dtype]), Faulty()
    return model, faulty, torch.compile(model, backend=faulty)


@functools.cache
def bench(dtype: str, seq: int = faults.SEQ, masked: bool = False) -> Bench:
    made = Bench(*compiled_once(dtype), DTYPES[dtype], seq)
    for side in (made.ruler, made.eager) if masked else ():
        _mask(side)
    return made


def of(dtype: str, name: str) -> tuple[Bench, Recorded]:
    """The bench that shows the fault, and what the faulty compiler gave."""
    if name == REMOVED:
        where = bench(dtype, masked=True)
        return where, where.candidate(None)
    fault = FAULTS[name]
    where = bench(dtype, LONG if fault.from_seq else faults.SEQ)
    return where, where.candidate(fault)


ALL = [*FAULTS, REMOVED]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _nobody_elses_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    compiled_once.cache_clear()
    bench.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fault_is_a_wrong_verdict_that_names_its_tensor(dtype: str) -> None:
    assert len(ALL) >= 25
    passed = {}
    for name in ALL:
        where, candidate = of(dtype, name)
        found = where.judge(candidate).whole
        target = "output" if name == REMOVED else FAULTS[name].target.replace("logits", "output")
        if found.verdict not in ("mismatch", "nonfinite") or target not in found.reason:
            passed[name] = (found.verdict, found.reason)
    assert not passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_fault_the_same_compiler_passes(dtype: str) -> None:
    for seq in (faults.SEQ, LONG):
        where = bench(dtype, seq)
        found = where.judge(where.candidate(None))
        assert (found.output.verdict, found.grad.verdict) == ("ok", "ok"), found.whole.reason


def test_a_fault_of_long_sequences_does_not_show_in_short_ones() -> None:
    short = bench("fp32")
    fault = FAULTS["gradient wrong from a certain length on"]
    assert short.judge(short.candidate(fault)).whole.verdict == "ok"


def test_a_hundred_honest_cells_in_three_dtypes_are_never_wrong() -> None:
    wrong = {}
    for dtype in DTYPES:
        where = bench(dtype)
        before = copy.deepcopy(where.model.state_dict())
        for seed in range(34):
            found = _cell(where, seed).whole
            if found.verdict not in ("ok", "caveat"):
                wrong[dtype, seed] = found.reason
            where.model.load_state_dict(before)
    assert not wrong


def _cell(where: Bench, seed: int) -> Verdicts:
    """Other weights and another batch for the compiled model."""
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in where.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    batches = faults.batches(2, seed=seed)
    wide = reference(copy.deepcopy(where.model).double(), batches, STEPS, scale=where.scale)
    where.faulty.begin(None)
    eager, candidate = (
        record(m, where.model, batches, STEPS, scale=where.scale) for m in (where.model, where.compiled)
    )
    assert eager.gradients.keys() == candidate.gradients.keys()
    return verdicts(candidate, eager, eager, wide, dtype=where.dtype, reference_name="float64")


def theirs(where: Bench, candidate: Recorded, *, cosine: bool = False, tol: float = 1e-2) -> str:
    """What benchmarks/dynamo would say: its comparator and its tolerance for training, on the same tensors."""
    from torch._dynamo.utils import same

    sides = [{**r.outputs, **r.gradients} for r in (where.eager, candidate, where.ruler)]
    try:
        fine = same(
            sides[0],
            sides[1],
            None if cosine else sides[2],
            cos_similarity=cosine,
            tol=tol,
            equal_nan=True,
        )
    except Exception as error:  # a missing name or a shape that does not broadcast
        return f"raises {type(error).__name__}"
    return "**passes**" if fine else "fails"


def page() -> str:
    """The table: ours and torch's comparator on the same faults."""
    lines = [
        "# Injected faults: what this comparator says, and what torch's says",
        "",
        "A backend for `torch.compile` (`tests/faults.py`) is wrong on purpose, one fault at a time, in two training",
        "steps of a two-layer Qwen2. `ours` is the verdict of `probes.parity.steps`; `same` is",
        "`torch._dynamo.utils.same` on the very same outputs, losses and gradients with the tolerance that",
        "benchmarks/dynamo gives to training (1e-2) and a float64 reference; `cosine` is its other metric, to which",
        "it changes when the float64 run fails. In fp16 the loss is scaled by 1,024, so its gradients are larger. Made by `python -m tests.test_faults`; a test holds the verdicts to it.",
        "",
        "| fault | dtype | ours | same | same, cosine |",
        "|:--|:--|:--|:--|:--|",
    ]
    counts = {"ours": 0, "same": 0, "cosine": 0}
    for name in ALL:
        for dtype in DTYPES:
            where, candidate = of(dtype, name)
            ours = where.judge(candidate).whole.verdict
            words = ours, theirs(where, candidate), theirs(where, candidate, cosine=True)
            for key, word in zip(counts, words, strict=True):
                counts[key] += word in ("ok", "caveat", "**passes**")
            lines.append(f"| {name} | {dtype} | {' | '.join(words)} |")
    total = len(ALL) * len(DTYPES)
    lines += [
        "",
        f"Passed for right, of {total}: ours {counts['ours']}, `same` {counts['same']}, its cosine {counts['cosine']}.",
        "",
    ]
    return "\n".join(lines)


def test_the_page_of_faults_has_every_fault_and_no_pass_of_ours() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| (.+?) \| (fp32|fp16|bf16) \| (\S+) \|", text, re.M)
    assert {(name, dtype) for name, dtype, _ in rows} == {(n, d) for n in ALL for d in DTYPES}
    assert {verdict for _, _, verdict in rows} <= {"mismatch", "nonfinite"}


def test_torchs_comparator_still_lets_zeros_and_turned_signs_pass_on_small_gradients() -> None:
    for name in ("every gradient zeroed", "sign of every gradient turned"):
        where, candidate = of("fp32", name)
        small = [n for n in candidate.gradients if "k_proj.weight" in n]
        one = {n: candidate.gradients[n] for n in small}
        assert theirs_of(where, one) == "**passes**", name


def theirs_of(where: Bench, gradients: dict[str, Tensor]) -> str:
    from torch._dynamo.utils import same

    eager, wide = ({n: side.gradients[n] for n in gradients} for side in (where.eager, where.ruler))
    return "**passes**" if same(eager, gradients, wide, tol=1e-2, equal_nan=True) else "fails"


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(PAGE).write_text(page())
    print(PAGE.read_text())
