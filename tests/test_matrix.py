"""The compile matrix: a broken compiler is a verdict, options change what runs, worse than expected is exit 1."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from harness import expectations, handing_on
from harness import suite as suites
from harness.cells import Measure
from harness.errors import HarnessError
from harness.rows import Result, Row
from probes.compile_matrix import PROBE, MatrixAxes
from probes.compile_matrix.cases import batches, case
from probes.compile_matrix.compiled import options
from probes.compile_matrix.work import run
from probes.table import table
from reports import matrix, verdicts
from tests.conftest import Ran
from tests.tasks import task
from tests.test_cli import harness

HEAD = 'schema = 1\ntitle = "t"\nprobe = "compile-matrix"\ndevice = "cpu"\n'


def cell(*, steps: int = 2, check: bool = True, **axes: object) -> Result:
    """One cell in this process, without code generation unless it is asked for."""
    chosen = {"model": "mlp", "backend": "aot_eager_decomp_partition", "seq": 8, "batch": 1, **axes}
    measure = Measure(steps=steps, check=check)
    return run(msgspec.convert(chosen, MatrixAxes), task(measure=measure))


@pytest.mark.parametrize("model", ["mlp", "layer", "lm"])
def test_a_stage_without_code_generation_is_right(model: str) -> None:
    found = cell(model=model, dtype="bf16")
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["graphs"] == 1
    assert found.parity
    assert found.parity.reference == "float64"
    for column in ("output", "grad", "compile_s", "eager_peak_bytes", "compiled_peak_bytes"):
        assert found.facts[column] is not None


def test_options_change_what_runs() -> None:
    base = cell()
    assert base.parity
    once = cell(steps=1)
    assert once.parity
    assert once.parity.tensors < base.parity.tensors
    assert once.facts["compile_s"] is None
    more = cell(accumulate=2)
    assert more.parity
    assert more.parity.tensors > base.parity.tensors
    assert len(more.loss) == 4
    twice = cell(second_backward=True)
    assert twice.verdict == "ok"
    kept = cell(set_to_none=False)
    assert kept.verdict == "ok"
    two_lengths = cell(dynamic=True)
    assert two_lengths.verdict_reason.startswith("seq ")
    unchecked = cell(check=False)
    assert (unchecked.verdict, "measure.check is false" in unchecked.verdict_reason) == ("no_reference", True)


def test_a_second_backward_doubles_gradients_and_kept_memory_does_not() -> None:
    from probes.parity.steps import Schedule, record

    axes = MatrixAxes(model="mlp", seq=4, batch=1)
    module = case(axes, "cpu", 0)
    given = batches(axes, 2, "cpu", 0)
    plain, twice, kept = (
        record(module, module, given, Schedule(second_backward=second, set_to_none=none)).gradients
        for second, none in ((False, True), (True, True), (False, False))
    )
    name = "step 2: up.weight"
    assert plain[name].mul(2).allclose(twice[name])
    assert plain[name].equal(kept[name])


def test_modes_are_inductors_own_options() -> None:
    assert options(MatrixAxes(mode="default")) == {}
    assert options(MatrixAxes(mode="reduce-overhead"))["triton.cudagraphs"] is True
    tuned = options(MatrixAxes(mode="max-autotune-no-cudagraphs"))
    assert tuned["max_autotune"] is True
    assert "triton.cudagraphs" not in tuned
    assert options(MatrixAxes(backend="aot_eager")) == {}


def test_a_measure_without_effect_is_refused() -> None:
    text = HEAD + 'measure = { warmup_steps = 7 }\n[axes]\nmodel = ["mlp"]\n'
    with pytest.raises(HarnessError, match="measure.warmup_steps: has no effect on probe 'compile-matrix'"):
        suites.parse(text, "t.toml", table())


def test_the_cpu_default_is_at_most_twelve_compiled_cells() -> None:
    suite = suites.load(suites.find("compile-matrix", "cpu"), table(), "cpu")
    running = [c for c in suite.cells if not c.skip]
    assert len(running) <= 12
    skipped = {c.skip for c in suite.cells if c.axes["mode"] in ("reduce-overhead", "max-autotune")}
    assert all("cudagraphs, which are for CUDA" in reason for reason in skipped)
    assert len(suite.cells) == 4 * 3 * 3


FAULTS = {
    "crash-in-compiler": ("crashed", "SIGABRT", "the compiler aborts"),
    "segfault-in-kernel": ("crashed", "SIGSEGV", "reads address 0"),
    "hang-in-autotuning": ("timeout", "deadline of 12 s", "AUTOTUNE"),
}


def test_a_compiler_that_crashes_or_hangs_is_a_line_of_the_table_with_its_last_words(
    run_suite: object,
) -> None:
    text = HEAD + "measure = { steps = 1, timeout_s = 12, grace_s = 1 }\n"
    text += '[axes]\nmodel = ["mlp"]\nseq = [8]\n'
    text += f"inject = [{', '.join(repr(f) for f in FAULTS)}]\n".replace("'", '"')
    ran: Ran = run_suite(text, probe=PROBE)  # type: ignore[operator]
    page = matrix.markdown(ran.rows)
    for fault, (status, reason, said) in FAULTS.items():
        row = ran.row(inject=fault)
        assert row.status == status, (row.reason, row.log_tail)
        assert reason in row.reason
        assert any(said in line for line in row.log_tail)
        assert said in page
    assert len(verdicts.failing(ran.rows)) == 3
    assert ran.outcome.exit_code == 1


def row(verdict: str = "ok", **axes: object) -> Row:
    chosen = msgspec.to_builtins(MatrixAxes(**axes))  # type: ignore[arg-type]
    return Row(suite="t", probe="compile-matrix", cell="c", device="cpu", axes=chosen, verdict=verdict)  # type: ignore[arg-type]


def test_worse_than_expected_is_unexpected_and_better_is_told(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    assert expectations.write(path, [row("mismatch", model="mlp"), row("ok", model="lm")]) == 2
    known = expectations.read(path)
    suite = suites.parse(HEAD + '[axes]\nmodel = ["mlp", "lm", "layer"]\n', "t.toml", table())
    by_model = {c.axes["model"]: c for c in expectations.applied(suite, known).cells}
    assert "mismatch" in by_model["mlp"].expect_verdict
    assert "crashed" not in by_model["mlp"].expect_status
    assert by_model["lm"].expect_verdict == ("ok",)
    assert by_model["layer"].expect_verdict == ("ok", "caveat")
    told = expectations.better([row("ok", model="mlp"), row("ok", model="lm")], known)
    assert len(told) == 1
    assert told[0].endswith("ok, expected mismatch")
    expectations.write(path, [row("ok", model="mlp")])
    assert expectations.better([row("ok", model="mlp")], expectations.read(path)) == []
    assert len(expectations.read(path)) == 2


def test_an_expectation_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text('[cells]\n"model=mlp" = "fine"\n')
    with pytest.raises(HarnessError, match="unknown outcome 'fine'"):
        expectations.read(path)


def test_the_committed_expectation_names_cells_of_the_suite() -> None:
    known = expectations.read(expectations.path_of("compile-matrix", "cpu"))
    suite = suites.load(suites.find("compile-matrix", "cpu"), table(), "cpu")
    names = {expectations.name_of(c.axes) for c in suite.cells if not c.skip}
    assert set(known) == names


def test_a_failing_cell_is_handed_on_with_its_axes() -> None:
    text = handing_on.text(table()["bisect"], [row("mismatch", model="mlp", dtype="bf16")], "cpu")
    suite = suites.parse(text, "bisect.toml", table())
    assert [(c.axes["model"], c.axes["dtype"], c.skip) for c in suite.cells] == [("mlp", "bf16", "")]
    assert "mismatch" in suite.cells[0].expect_verdict


def test_other_axes_that_differ_stand_beside_the_module() -> None:
    found = matrix.lines([row(model="mlp", seq=8), row(model="mlp", seq=9)])
    assert [line[0] for line in found] == ["mlp seq=8", "mlp seq=9"]


def test_the_table_has_the_catalogues_columns() -> None:
    assert matrix.COLUMNS[1:6] == ("mode", "dtype", "output", "grad", "verdict")
    text = matrix.markdown([row("mismatch", model="mlp", dtype="fp16")])
    assert "| mlp | default | fp16 |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fault-drill", "fault=none", "--no-bisect"), "fault-drill hands no cell on to another probe"),
        (("compile-matrix", "model=mlp", "--accept", "x"), "--accept RUN takes no other option"),
        (("compile-matrix", "model=mpl"), "unknown model 'mpl'"),
        (("compile-matrix", "mode=fast"), "unknown value 'fast'"),
    ],
)
def test_what_a_probe_cannot_do_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = harness(*arguments, module="harness.probe")
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_a_mode_is_right_or_says_why_not(mode: str) -> None:
    axes = MatrixAxes(model="lm", mode=mode, dtype="fp16")  # type: ignore[arg-type]
    found = run(axes, task("cuda", measure=Measure(steps=3)))
    assert found.status in ("ok", "unsupported"), found.reason
    if found.status == "ok":
        assert found.verdict in ("ok", "caveat"), found.verdict_reason
        assert found.facts["compiled_peak_bytes"]
