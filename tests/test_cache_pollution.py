"""cache-pollution: what ran before is seen in what is compiled and in the values; the control differs in nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._inductor.compile_fx  # as the fork server has, or each phase would import it
from torch import Tensor

from harness.cells import Measure
from harness.rows import Parity, Result
from probes import cache_pollution
from probes.cache_pollution import PollutionAxes, phase
from probes.cache_pollution.phase import Phase
from probes.cache_pollution.work import judge, run, state_changes
from probes.compile_matrix.cases import Mlp
from tests.conftest import rows_of
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task
from tests.test_cli import harness

pytestmark = pytest.mark.usefixtures("clean_dynamo")
Cell = Callable[..., Result]
STOCK = Mlp.forward


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """One cell, its phases forks of this process; without code generation unless it is asked for."""

    def run_one(device: str = "cpu", **axes: object) -> Result:
        chosen = msgspec.convert({"backend": "aot_eager", "seq": 8, "batch": 1, **axes}, PollutionAxes)
        return run(chosen, task(device, measure=Measure(steps=2), folder=tmp_path))

    return run_one


def test_the_control_differs_in_nothing(cell: Cell) -> None:
    found = cell()
    assert found.verdict == "ok", found.verdict_reason
    assert "the same bits and graphs as cold" in found.verdict_reason
    for name in ("cold", "warm", "after"):
        assert (found.facts[f"{name}: graphs"], found.facts[f"{name}: graph_runs"]) == (1, 2)
        for column in ("compile_s", "first_step_s", "step_s", "held_bytes", "peak_bytes"):
            assert found.facts[f"{name}: {column}"] is not None


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("same-cell", "0 graphs compiled, cold 1: earlier ones served"),
        ("other-dtype", "1 recompiles, cold 0: tensor 'x_BSH' dtype mismatch"),
        ("other-seqs", "1 sizes of inputs are symbols, cold 0"),
        ("suppressed-failure", "no compiled graph ran: all of it ran eagerly"),
    ],
)
def test_what_ran_before_changes_what_is_compiled_and_a_reset_mends_it(
    cell: Cell, before: str, words: str
) -> None:
    found = cell(before=before)
    assert found.verdict == "mismatch"
    assert f"after {before}: " in found.verdict_reason
    assert words in found.verdict_reason
    mended = cell(before=before, reset=True)
    assert mended.verdict == "ok", mended.verdict_reason


def test_a_failure_that_raised_leaves_nothing_behind(cell: Cell) -> None:
    found = cell(before="failing-compile")
    assert found.verdict == "ok", found.verdict_reason


def poisoned(factor: float) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        def forward(self: Mlp, x_BSH: Tensor, target_BSH: Tensor) -> tuple[Tensor, Tensor]:
            y_BSH, loss = STOCK(self, x_BSH, target_BSH)
            return y_BSH * factor, loss * factor

        Mlp.forward = forward  # type: ignore[method-assign] # in the fork alone

    return leave


def test_values_beyond_their_bars_are_a_mismatch_that_names_a_tensor(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase, "before", poisoned(1.01))
    found = cell(before="same-cell")
    assert found.verdict == "mismatch"
    assert "tensors differ from cold" in found.verdict_reason
    assert "against float64: mismatch" in found.verdict_reason
    assert found.facts["after: graphs"] == found.facts["cold: graphs"] == 1
    assert found.facts["warm: tensors_that_differ"] == 0
    assert found.parity
    assert found.parity.worst[0].name.startswith("step 1")
    assert Mlp.forward is STOCK


def test_other_bits_within_the_bars_are_a_caveat(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "before", poisoned(1 + 2**-23))
    found = cell(before="same-cell")
    assert found.verdict == "caveat", found.verdict_reason
    assert found.facts["after: tensors_that_differ"]


def test_a_phase_that_dies_is_a_row(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "before", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    found = cell(before="same-cell")
    assert (found.status, found.reason) == ("crashed", "the process of phase 'after' died")


def phase_of(**changes: Any) -> Phase:
    base: dict[str, Any] = {"compile_s": 2.0, "first_step_s": 2.1, "step_s": 0.1, "held_bytes": 0}
    base |= {"peak_bytes": 0, "hits": 0, "misses": 1, "graphs": 1, "runs": 2, "values": ""}
    return Phase(**base | changes)


def test_the_verdict_is_the_worst_of_warm_and_after() -> None:
    cold, same, titles = phase_of(), phase_of(), {"warm": "warm", "after": "after x"}
    clean: dict[str, list[str]] = {"warm": [], "after": []}
    assert judge(cold, {"warm": same, "after": same}, clean, {}, titles)[0] == "ok"
    eager = phase_of(given_up=["skipped frame: f"])
    verdict, reason = judge(cold, {"warm": eager, "after": same}, clean, {}, titles)
    assert (verdict, "warm: ran eagerly: skipped frame: f" in reason) == ("mismatch", True)
    for verdict in ("nonfinite", "no_reference", "mismatch"):
        held = {"warm": Parity(verdict=verdict, reason="r")}  # type: ignore[arg-type]
        changed = {"warm": ["a"], "after": []}
        assert judge(cold, {"warm": same, "after": same}, changed, held, titles)[0] == verdict
    assert state_changes(cold, same) == []


def test_what_cannot_be_is_skipped_or_refused() -> None:
    assert cache_pollution.skip(PollutionAxes(reset=True), "cpu") == "there is nothing to reset"
    assert "cudagraphs" in cache_pollution.skip(PollutionAxes(mode="reduce-overhead"), "cpu")
    done = harness("cache-pollution", "before=other-seq", module="harness.probe")
    assert (done.returncode, "Did you mean 'other-seqs'" in done.stderr) == (2, True)
    assert harness("cache-pollution", "model=nlp", module="harness.probe").returncode == 2


@pytest.mark.slow
def test_through_inductor_a_warm_cache_is_hit_and_a_cold_one_is_not(tmp_path: Path) -> None:
    """From the command line: a fork of a process in which Inductor has threads would hang."""
    out = tmp_path / "run"
    axes = ("backend=inductor", "seq=8", "batch=1")
    done = harness("cache-pollution", *axes, "--steps", "2", "--out", str(out), module="harness.probe")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = rows_of(out)
    assert found.verdict == "ok", found.verdict_reason
    assert (found.facts["cold: cache_hits"], found.facts["after: cache_hits"]) == (0, 0)
    assert found.facts["warm: cache_hits"] == found.facts["cold: cache_misses"] == 2
    assert found.facts["warm: compile_s"] < found.facts["cold: compile_s"]  # type: ignore[operator]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("before", ["nothing", "other-seqs"])
def test_on_a_gpu_the_phases_are_fresh_processes(cell: Cell, before: str) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process has a CUDA context, and a fork of it has none")
    found = cell("cuda", backend="inductor", model="lm", dtype="fp16", before=before)
    assert found.status == "ok", found.reason
    assert (found.verdict == "mismatch") == (before == "other-seqs"), found.verdict_reason
