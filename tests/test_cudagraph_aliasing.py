"""cudagraph-aliasing: memory at fixed addresses makes gradients wrong where autograd takes them over, and only there."""

from __future__ import annotations

import msgspec
import pytest
import torch

from harness.rows import Result
from probes import cudagraph_aliasing
from probes.cudagraph_aliasing import AliasingAxes, work
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task

pytestmark = pytest.mark.usefixtures("clean_dynamo")
STOLEN = ("accumulate", "accumulate-marked", "accumulate-zeroed", "held-grads", "held-outputs")


def cell(device: str = "cpu", **axes: object) -> Result:
    return work.run(msgspec.convert({"memory": "static", **axes}, AliasingAxes), task(device))


@pytest.mark.parametrize("scenario", STOLEN)
def test_what_lies_in_a_graphs_memory_is_wrong_in_silence_where_nobody_checks(scenario: str) -> None:
    """pytorch #96693, #106321: the mechanism, without a CUDA graph."""
    found = cell(scenario=scenario)
    assert (found.verdict, found.facts["outcome"]) == ("mismatch", "wrong in silence")
    assert found.parity
    assert found.parity.worst[0].error is not None
    assert found.parity.worst[0].error > 0.5
    assert "emulated" in found.notes[0]


@pytest.mark.parametrize("model", ["mlp", "lm"])
@pytest.mark.parametrize("scenario", ["accumulate-owned", "copied-outputs"])
def test_memory_of_ones_own_is_right(scenario: str, model: str) -> None:
    found = cell(scenario=scenario, model=model)
    assert (found.verdict, found.facts["outcome"]) == ("ok", "right"), found.verdict_reason


def test_a_compiler_without_such_memory_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "backend", lambda: "aot_eager")
    assert cell(scenario="accumulate").verdict == "ok"


def test_a_refusal_is_told_from_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(said: str) -> object:
        def call(*_: object) -> None:
            raise RuntimeError(said)

        return lambda module, axes: call

    said = "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
    monkeypatch.setattr(work, "_compiled", refuses(said))
    found = cell(scenario="held-outputs")
    assert (found.verdict, found.facts["outcome"]) == ("caveat", "refused")
    monkeypatch.setattr(work, "_compiled", refuses("out of luck"))
    with pytest.raises(RuntimeError, match="out of luck"):
        cell(scenario="held-outputs")


def test_graphs_that_never_ran_put_nothing_to_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_compiled", lambda module, axes: module)
    found = cell(memory="cudagraphs")
    assert (found.status, found.reason.partition(":")[0]) == ("unsupported", "no CUDA graph was launched")


def test_cudagraphs_on_a_cpu_are_a_skip() -> None:
    assert cudagraph_aliasing.PROBE.skip(AliasingAxes(), "cpu") == "cudagraphs are for CUDA"
    assert not cudagraph_aliasing.PROBE.skip(AliasingAxes(memory="static"), "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scenario", ["accumulate", "accumulate-owned", "held-grads", "copied-outputs"])
def test_on_a_gpu_every_scenario_has_an_outcome_and_copies_are_right(scenario: str) -> None:
    found = cell("cuda", memory="cudagraphs", scenario=scenario)
    assert found.status == "ok", found.reason
    assert found.facts["outcome"] in ("right", "refused", "wrong in silence")
    if scenario == "copied-outputs":
        assert found.facts["outcome"] == "right"
