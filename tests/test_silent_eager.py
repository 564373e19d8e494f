"""silent-eager: every cause is noticed and named with its line, and a model that ran compiled raises no alarm."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

import tc_volta
from harness.cells import Measure
from harness.rows import Result
from probes import silent_eager
from probes.dynamo_watch import Cause, watching
from probes.silent_eager import SilentAxes, work
from probes.silent_eager.judge import Evidence, judge
from probes.silent_eager.ran import ASKED, Ran, classify, mark
from probes.silent_eager.scenarios import FromCpu, Mutating, Plain, provoked
from probes.silent_eager.work import gather, run
from probes.train_step.compiler_view import cudagraph_skips
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task
from tests.test_cli import harness

ALL = Ran(asked=2, compiled=2, eager={}, graph_launches=0)


pytestmark = pytest.mark.usefixtures("clean_dynamo")


def cell(device: str = "cpu", **axes: object) -> Result:
    chosen = msgspec.convert(axes, SilentAxes)
    return run(chosen, task(device, measure=Measure(steps=3)))


DYNAMO = {
    "recompile-limit": ("recompile limit at ", "scenarios.py:", "config.recompile_limit (8) was hit"),
    "accumulated-limit": ("recompile limit at ", "scenarios.py:", "config.accumulated_recompile_limit (4)"),
    "disabled-function": ("graph break at ", "scenarios.py:", "torch.compiler.disable"),
    "skipfile": ("skipped frame at ", "container.py", "skipfiles"),
    "unsupported-frame": ("skipped frame at ", "scenarios.py:", "graph_break"),
    "suppressed-error": ("suppressed error at ", "scenarios.py:", "this backend fails on every graph"),
    "backend-fallback": ("backend: ", "", "this backend fails on every graph"),
}


@pytest.mark.parametrize("cause", DYNAMO)
def test_a_cause_is_noticed_with_its_line_and_reason(cause: str) -> None:
    found = cell(cause=cause)
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["judged"] == "mismatch"
    for words in DYNAMO[cause]:
        assert words in str(found.facts["causes"])


def test_a_process_told_to_compile_nothing_is_noticed() -> None:
    found = cell(cause="nothing-compiled")
    assert found.verdict == "ok", found.verdict_reason
    assert (found.facts["compiled_graphs_run"], found.facts["eager_operators"]) == (0, 3)


def test_a_judge_that_is_deaf_and_blind_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "observe", lambda step, device: ALL)
    monkeypatch.setattr("probes.dynamo_watch.Watch.emit", lambda self, record: None)
    for cause in ("recompile-limit", "unsupported-frame", "nothing-compiled"):
        found = cell(cause=cause)
        assert found.verdict == "mismatch"
        assert found.verdict_reason.startswith("NOT noticed")


def test_naming_another_cause_is_not_noticing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.dynamo_watch.Watch.emit", lambda self, record: None)
    found = cell(cause="suppressed-error")
    assert (found.facts["judged"], found.verdict) == ("mismatch", "mismatch")


def evidence_of(model: nn.Module) -> Evidence:
    model.compile(backend="aot_eager")
    mark([model])

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()

    return gather(model, step, 2, "cpu", cudagraphs=False)[0]


def test_without_a_cause_there_is_no_alarm() -> None:
    judged = judge(evidence_of(Plain()))
    assert judged.verdict == "ok", judged.reason
    assert judged.reason == "1 calls ran 1 compiled graphs, and no operator beside them"


@pytest.mark.parametrize("kind", [FromCpu, Mutating])
def test_modules_that_keep_cudagraphs_away_are_otherwise_compiled_whole(kind: type[Plain]) -> None:
    judged = judge(evidence_of(kind()))
    assert judged.verdict == "ok", judged.reason


def test_a_backward_that_falls_back_under_tc_volta_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tc_volta.compile(Plain(), backend="aot_eager")
    tc_volta.report(model).fallbacks.append("backward: RuntimeError: no kernel")
    mark([model])
    judged = judge(gather(model, lambda: model(torch.ones(2, 8)), 1, "cpu", cudagraphs=False)[0])
    assert judged.verdict == "mismatch"
    assert "backend: backward: RuntimeError: no kernel" in judged.reason


class Chatty(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        print("between two graphs")
        return y * 2


def test_a_break_with_nothing_eager_is_a_caveat_with_its_line() -> None:
    judged = judge(evidence_of(Chatty()))
    assert judged.verdict == "caveat", judged.reason
    assert "all operators ran compiled; 1 graph breaks" in judged.reason
    assert f"{__file__}:" in judged.causes[0].where


def test_a_frame_that_inductor_skips_for_bf16_is_told_by_its_words() -> None:
    def refuses(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise torch._dynamo.exc.SkipFrame("BF16 is not supported")

    model = Plain()
    model.compile(backend=refuses)
    mark([model])
    judged = judge(gather(model, lambda: model(torch.ones(2, 8)), 1, "cpu", cudagraphs=False)[0])
    assert judged.verdict == "mismatch"
    assert judged.causes[0].kind == "bf16 skip"
    assert "nothing ran compiled" in judged.reason


def test_cudagraphs_that_were_asked_for_must_have_been_launched_and_not_skipped() -> None:
    launched = msgspec.structs.replace(ALL, graph_launches=4)
    assert judge(Evidence(ran=launched, cudagraphs=True)).verdict == "ok"
    assert judge(Evidence(ran=ALL)).verdict == "ok"
    silent = judge(Evidence(ran=ALL, cudagraphs=True))
    assert (silent.verdict, "no graph was launched" in silent.reason) == ("mismatch", True)
    text = 'skipping cudagraphs due to mutated inputs (1 instances). Found from : File "a.py", line 3, in f x.add_(1)'
    told = judge(Evidence(ran=launched, cudagraphs=True, cudagraph_skips=(text,)))
    assert told.verdict == "mismatch"
    assert told.causes == (
        Cause(
            kind="cudagraphs", why="skipping cudagraphs due to mutated inputs (1 instances)", where="a.py:3"
        ),
    )


def test_what_the_policy_turned_off_and_said_is_a_caveat() -> None:
    judged = judge(Evidence(ran=ALL, refused=("mode reduce-overhead, less what the policy turns off",)))
    assert (judged.verdict, "policy turns off" in judged.reason) == ("caveat", True)


def test_a_module_that_is_never_called_is_no_pass() -> None:
    assert judge(Evidence(ran=Ran(asked=0, compiled=0, eager={}, graph_launches=0))).verdict == "mismatch"


def test_only_operators_outside_every_compiled_range_count_as_eager() -> None:
    def event(name: str, parent: object = None, device_type: DeviceType = DeviceType.CPU) -> SimpleNamespace:
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=device_type)

    asked = event(ASKED)
    region = event("Torch-Compiled Region: 0/0", asked)
    graph = event("CompiledFunction", region)
    inner = event("## Call CompiledFxGraph abc ##", graph)
    norm = event("aten::norm", region)
    names = [asked, region, graph, inner, norm, event("aten::mm", inner), event("aten::sqrt", norm)]
    names += [event("aten::detach", region), event("aten::sum"), event("tc_volta::flash_attn", asked)]
    names += [event("aten::copy_", event("AOTDispatcher Runtime Wrapper Prologue", region))]
    names += [event(ASKED, None, DeviceType.CUDA), event("at::native::add", asked, DeviceType.CUDA)]
    found = classify([*names, event("cudaGraphLaunch", inner)])
    assert (found.asked, found.compiled, found.graph_launches) == (1, 1, 1)
    assert found.eager == {"aten::norm": 1, "tc_volta::flash_attn": 1}


def test_a_real_model_without_code_generation_ran_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    from probes.train_step import training

    how = functools.partial(tc_volta.compile_layers, backend="aot_eager")
    monkeypatch.setitem(training._COMPILERS, "layers", how)
    found = cell(attention="flash", seq=16)
    assert found.verdict == "ok", found.verdict_reason
    assert found.verdict_reason == "2 calls ran 2 compiled graphs, and no operator beside them"
    assert found.compile
    assert found.compile.asked == "layers, mode default"


def test_a_break_planted_in_a_real_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    from transformers.models.qwen2 import modeling_qwen2

    from probes.train_step import training

    stock = modeling_qwen2.Qwen2MLP.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.compiler.disable(torch.tanh)(stock(self, x))

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", forward)
    how = functools.partial(tc_volta.compile_layers, backend="aot_eager")
    monkeypatch.setitem(training._COMPILERS, "layers", how)
    found = cell(seq=16)
    assert found.verdict == "mismatch"
    assert "aten::tanh" in found.verdict_reason
    assert f"graph break at {__file__}:" in found.verdict_reason


def test_the_log_and_its_level_are_put_back() -> None:
    import logging

    logger = logging.getLogger("torch._dynamo.convert_frame")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with watching():
        assert logger.level == logging.DEBUG
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_settings_of_a_scenario_end_with_it() -> None:
    with provoked("suppressed-error", "cpu"):
        assert torch._dynamo.config.suppress_errors
    assert not torch._dynamo.config.suppress_errors


def test_options_without_effect_are_skips_and_unknown_values_are_refused() -> None:
    assert "seq would have no effect" in silent_eager.skip(SilentAxes(cause="skipfile", seq=128), "cpu")
    assert "native bfloat16" in silent_eager.skip(SilentAxes(cause="bf16"), "cpu")
    assert silent_eager.skip(SilentAxes(cause="bf16"), "cuda") == ""
    assert "cudagraphs" in silent_eager.skip(SilentAxes(mode="reduce-overhead"), "cpu")
    done = harness("silent-eager", "cause=recompile-limits", module="harness.probe")
    assert (done.returncode, "Did you mean 'recompile-limit'" in done.stderr) == (2, True)
    assert harness("silent-eager", "model=tiny", module="harness.probe").returncode == 2


def test_a_cudagraph_skip_keeps_the_line_that_inductor_names() -> None:
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    with cudagraph_skips() as skips:
        log_cudagraph_skip_and_bump_counter(
            'skipping cudagraphs due to cpu device (x). Found from : \n   File "a.py", line 3, in f\n    y = x + 1'
        )
    assert judge(Evidence(ran=ALL, cudagraphs=True, cudagraph_skips=tuple(skips))).causes[0].where == "a.py:3"


@pytest.mark.slow
def test_cudagraphs_on_a_cpu_are_a_skip_that_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = cell(cause="cudagraphs-cpu-tensor")
    assert found.verdict == "ok", found.verdict_reason


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cause", silent_eager.THROUGH_INDUCTOR)
def test_on_a_gpu_a_cause_in_inductor_is_noticed(cause: str) -> None:
    found = cell("cuda", cause=cause)
    assert found.verdict == "ok", found.verdict_reason


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_cudagraphs_of_a_model_are_launched_or_the_reason_is_told() -> None:
    found = cell("cuda", mode="reduce-overhead", compile="model", dtype="fp16")
    assert found.verdict in ("ok", "caveat") or "cudagraphs" in found.verdict_reason
    if found.verdict == "ok":
        assert found.facts["graph_launches"] > 0  # type: ignore[operator]
