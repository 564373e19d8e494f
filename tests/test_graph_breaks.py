"""graph-breaks: a line that breaks is named, a guard that fails is quoted, and a whole graph is ok."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

from harness.cells import Measure
from harness.rows import Result
from probes import graph_breaks
from probes.dynamo_watch import Cause, Recompile, short_path
from probes.graph_breaks import BreakAxes
from probes.graph_breaks.work import judge, run
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task
from tests.test_cli import harness

pytestmark = pytest.mark.usefixtures("clean_dynamo")
STOCK = modeling_qwen2.Qwen2MLP.forward


def cell(*, steps: int = 3, device: str = "cpu", **axes: object) -> Result:
    chosen = msgspec.convert({"compile": "layers", "seq": 8, "batch": 1, **axes}, BreakAxes)
    return run(chosen, task(device, measure=Measure(steps=steps)))


def breaking(self: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = STOCK(self, x)
    torch._dynamo.graph_break()
    return y + y.mean().item()


@pytest.mark.parametrize("compile", ["layers", "mlp"])
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_stock_model_is_one_graph(compile: str, attention: str) -> None:
    found = cell(compile=compile, attention=attention)
    assert found.verdict == "ok", found.verdict_reason
    assert (found.facts["graphs"], found.facts["graph_breaks"], found.facts["recompiles"]) == (1, 0, 0)


def test_lines_that_break_are_named_with_reason_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", breaking)
    found = cell(compile="mlp")
    assert found.verdict == "caveat", found.verdict_reason
    first = breaking.__code__.co_firstlineno
    told = [str(v) for k, v in found.facts.items() if k.startswith("break ")]
    assert found.facts["lines_that_break"] == 2
    assert any(
        t.startswith(f"{__file__}:{first + 2} (1x): Call to `torch._dynamo.graph_break()`") for t in told
    )
    assert any(t.startswith(f"{__file__}:{first + 3} (1x)") and "item" in t for t in told)
    assert "2 graph breaks on 2 lines" in found.verdict_reason
    assert found.compile
    assert len(found.compile.graph_breaks) == 2


def test_a_frame_that_is_given_up_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def looping(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = STOCK(self, x)
        return x

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", looping)
    found = cell(compile="mlp")
    assert found.verdict == "mismatch"
    assert "given up to eager: skipped frame" in found.verdict_reason
    assert f"{__file__}:{looping.__code__.co_firstlineno}" in str(found.facts["given up 1"])


@pytest.mark.parametrize(
    ("vary", "guard"),
    [
        ("seq", "size mismatch at index 1. expected 8, actual 16"),
        ("batch", "at index 0"),
        ("mode", "training"),
    ],
)
def test_a_guard_that_fails_is_quoted(vary: str, guard: str) -> None:
    found = cell(vary=vary, batch=2)
    assert found.verdict == "caveat", found.verdict_reason
    assert found.facts["recompiles"] == 1
    assert guard in str(found.facts["recompile 1"])


def test_an_int_of_the_whole_model_is_a_guard() -> None:
    found = cell(compile="model", vary="int")
    assert found.facts["recompiles"] == 1
    assert "logits_to_keep" in str(found.facts["recompile 1"])


def test_sizes_that_are_dynamic_from_the_start_compile_once() -> None:
    assert cell(vary="seq", dynamic="always", batch=2).verdict == "ok"


def test_constant_sizes_that_vary_run_into_the_limit() -> None:
    found = cell(vary="seq", dynamic="never", compile="mlp", steps=10)
    assert found.verdict == "mismatch"
    assert "recompile limit" in found.verdict_reason
    assert "config.recompile_limit (8) was hit" in found.verdict_reason


def test_a_cache_makes_a_guard_of_each_layer() -> None:
    assert "cache" in str(cell(use_cache=True).facts["recompile 1"])


def test_the_verdict_is_the_worst_of_what_was_seen() -> None:
    cut = Cause(kind="graph break", why="print", where="a.py:3")
    again = Recompile(guard="k == 1", where="a.py:4", frame="forward")
    assert judge(3, 1, [], [], []) == ("ok", "no graph break and no recompile in 3 calls of 1 graph")
    assert judge(3, 2, [cut, cut], [], []) == ("caveat", "2 graph breaks on 1 line: a.py:3: print")
    assert judge(3, 2, [cut], [again], [])[0] == "caveat"
    assert judge(3, 0, [], [], []) == ("mismatch", "nothing was compiled")
    assert judge(3, 2, [], [again], [Cause(kind="recompile limit", why="w")])[0] == "mismatch"


def test_files_of_packages_are_told_by_their_place_there() -> None:
    assert short_path("/x/lib/site-packages/transformers/a.py") == "transformers/a.py"
    assert short_path("/mine/a.py") == "/mine/a.py"


def test_what_cannot_be_is_skipped_or_refused() -> None:
    assert "whole model" in graph_breaks.skip(BreakAxes(vary="int", compile="mlp"), "cpu")
    assert "cache is the attention's" in graph_breaks.skip(BreakAxes(use_cache=True, compile="mlp"), "cpu")
    assert "is for CUDA" in graph_breaks.skip(BreakAxes(attention="xformers"), "cpu")
    done = harness("graph-breaks", "vary=sequence", module="harness.probe")
    assert (done.returncode, "unknown value 'sequence'" in done.stderr) == (2, True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["sdpa", "efficient"])
def test_on_a_gpu_a_stock_model_is_one_graph(attention: str) -> None:
    found = cell(device="cuda", dtype="fp16", attention=attention, compile="model", seq=64)
    assert found.verdict == "ok", found.verdict_reason
