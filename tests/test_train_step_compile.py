"""What the compiler did is in the row: graphs, breaks with their line, recompiles, fallbacks, seconds by phase."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

import tc_volta
from harness.cells import Measure
from harness.rows import Result
from probes.train_step import TrainStepAxes, compiler_view
from probes.train_step import training as training_module
from probes.train_step.work import run
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task

pytestmark = pytest.mark.usefixtures("clean_dynamo")


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


def compiled(model: nn.Module, **how: object) -> nn.Module:
    return tc_volta.compile(model, backend="aot_eager", **how)  # type: ignore[arg-type]


def test_a_graph_is_counted_and_its_seconds_are_told_once() -> None:
    model = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model(torch.ones(2, 4)).sum().backward()
    found = compiler_view.look(model, [])
    assert found.graphs == 1
    assert found.graph_breaks == ()
    phases = dict(found.phases_s)
    total = phases.pop("total")
    assert total
    assert sum(v or 0 for v in phases.values()) == pytest.approx(total, rel=0.05)


def test_a_graph_break_has_its_reason_and_line() -> None:
    model = compiled(Breaks())
    model(torch.ones(2, 4)).sum().backward()
    found = compiler_view.look(model, [])
    assert found.graphs == 2
    (one,) = found.graph_breaks
    assert "graph_break" in one.reason
    assert one.where.split(":")[0] == __file__


def test_a_recompile_has_its_reason() -> None:
    model = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for rows in (2, 3):
        model(torch.ones(rows, 4)).sum().backward()
    found = compiler_view.look(model, [])
    assert found.graphs == 2
    assert any("size mismatch" in why for why in found.recompiles), found.recompiles


def test_what_runs_eagerly_after_all_is_told_with_the_compilers_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> object:
        raise AssertionError("no kernel for this graph")

    monkeypatch.setattr("tc_volta.backend._through", broken)
    model = compiled(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    found = compiler_view.look(model, [])
    assert found.graphs == 0
    assert found.fallbacks == ("AssertionError: no kernel for this graph",)


def test_an_eager_model_beside_it_adds_nothing() -> None:
    model = compiled(nn.Linear(4, 4))
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    assert compiler_view.look(model, []).graphs == 0


def test_phases_of_forward_and_backward_add_up_without_overlap() -> None:
    """As Inductor reported them for one compiled MLP: the backward was compiled at its first run."""
    forward = SimpleNamespace(
        duration_us=32_804_040,
        dynamo_cumulative_compile_time_us=32_804_040,
        aot_autograd_cumulative_compile_time_us=32_438_493,
        inductor_cumulative_compile_time_us=29_708_654,
        inductor_code_gen_cumulative_compile_time_us=29_532_181,
    )
    backward = SimpleNamespace(
        duration_us=2_558_570,
        inductor_cumulative_compile_time_us=2_550_680,
        inductor_code_gen_cumulative_compile_time_us=2_443_279,
    )
    phases = compiler_view._phases([forward, backward])
    total = phases.pop("total")
    assert total == pytest.approx(35.3626, rel=1e-4)
    assert sum(v or 0 for v in phases.values()) == pytest.approx(total, rel=1e-3)
    assert phases["tracing"] == pytest.approx(0.3655, rel=1e-3)
    assert phases["code generation and kernels"] == pytest.approx(31.9755, rel=1e-4)


def test_nothing_compiled_has_no_phases() -> None:
    assert compiler_view._phases([]) == {}


def test_a_skipped_cudagraph_is_no_cudagraph() -> None:
    model = compiled(nn.Linear(4, 4))
    with compiler_view.cudagraph_skips() as skips:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (1 instances)")
    found = compiler_view.look(model, skips)
    assert not found.cudagraphs
    assert found.cudagraph_skips == ("skipping cudagraphs due to mutated inputs (1 instances)",)


def test_a_skip_that_nobody_logged_is_still_counted() -> None:
    model = compiled(nn.Linear(4, 4))
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device")
    assert compiler_view.look(model, []).cudagraph_skips == ("1 skips, no reason logged",)


def test_private_names_of_torch_are_there() -> None:
    """Where a torch lacks one, the report would be silently emptier."""
    fields = {f for _, f in compiler_view._NESTED} | {"duration_us", "recompile_reason", "fail_reason"}
    assert fields <= set(torch._dynamo.utils.CompilationMetrics.__dataclass_fields__)
    assert isinstance(torch._dynamo.utils.graph_break_reasons, list)


def cell(compile: str) -> Result:
    """One cell in this process, on a CPU."""
    axes = TrainStepAxes(model="tiny-qwen2-4h", seq=32, attention="flash", compile=compile)  # type: ignore[arg-type]
    return run(axes, task(measure=Measure(steps=2, warmup_steps=0)))


@pytest.mark.parametrize(("compile", "graphs"), [("mlp", 1), ("layers", 1), ("model", 1)])
def test_a_compiled_cells_row_has_its_graphs_its_kernel_and_its_verdict(
    compile: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Inductor, for the time's sake. Layers of one shape share a graph."""
    how = training_module._COMPILERS[compile]
    monkeypatch.setitem(training_module._COMPILERS, compile, partial(how, backend="aot_eager"))
    found = cell(compile)
    assert found.status == "ok"
    assert found.compile
    assert (found.compile.graphs, found.compile.graph_breaks, found.compile.recompiles) == (graphs, (), ())
    assert found.compile.fallbacks == ()
    assert found.compile.asked == f"{compile}, mode default"
    assert found.attention
    assert found.attention.ran == "flash"
    assert found.verdict == "ok", found.verdict_reason
    assert len(set(found.loss)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["mlp", "layers"])
def test_a_cell_through_inductor_is_right_and_its_seconds_are_told(
    compile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache is its own: with one that an earlier run left, no kernel is generated."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = cell(compile)
    assert found.compile
    assert found.compile.graphs == 1  # both layers share it
    assert found.compile.fallbacks == ()
    assert found.compile.phases_s["code generation and kernels"]
    assert found.facts == {"fxgraph_cache_hit": 0, "fxgraph_cache_miss": 2}
    assert found.verdict == "ok", found.verdict_reason
