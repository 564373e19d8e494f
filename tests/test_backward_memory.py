"""backward-memory: bytes are counted, tensors that are extra are named, and equal steps are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from harness import suite as suites
from harness.cells import Measure, Task
from harness.rows import Result
from probes import backward_memory
from probes.backward_memory import BackwardMemoryAxes, work
from probes.backward_memory.ledger import Block, Event, by_kind, extra, largest, last_at, peak_of
from probes.backward_memory.record import events_of_history, events_of_trace, recorded
from probes.backward_memory.saved import saving
from probes.backward_memory.work import run
from probes.table import table
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.test_cli import harness

pytestmark = pytest.mark.usefixtures("clean_dynamo")


@pytest.fixture
def cell(tmp_path: Path) -> Callable[..., Result]:
    def one(*, check: bool = True, device: str = "cpu", **axes: object) -> Result:
        task = Task(
            id="t",
            work=backward_memory.PROBE.work,
            axes={},
            device=device,  # type: ignore[arg-type]
            measure=Measure(check=check),
            seed=0,
            folder=str(tmp_path),
            result_path="",
            log_path="",
        )
        return run(msgspec.convert({"compile": "none", "seq": 64, **axes}, BackwardMemoryAxes), task)

    return one


def number(found: Result, name: str) -> float:
    value = found.facts[name]
    assert isinstance(value, int | float)
    return value


def test_eager_beside_itself_is_equal_and_its_peak_is_explained(cell: Callable[..., Result]) -> None:
    found = cell()
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["ratio"] == 1.0
    kinds = [number(found, f"eager_at_peak_{kind}_bytes") for kind in ("saved", "logits", "temporary")]
    assert number(found, "parameters_and_batch_bytes") + sum(kinds) == number(found, "eager_peak_bytes")
    assert "loss_utils.py" in str(found.facts["eager_largest_1"])
    assert number(found, "eager_bytes_per_token") > 0
    assert "a CPU has no device allocator" in found.notes[0]


def test_checkpoints_and_the_length_change_what_is_measured(cell: Callable[..., Result]) -> None:
    plain, kept, longer = cell(), cell(checkpointing=True), cell(seq=128)
    assert number(kept, "eager_peak_bytes") < number(plain, "eager_peak_bytes")
    assert number(kept, "eager_saved_bytes") < number(plain, "eager_saved_bytes")
    assert number(longer, "eager_saved_bytes") == pytest.approx(
        2 * number(plain, "eager_saved_bytes"), rel=0.01
    )


class _Hoard(torch.autograd.Function):
    """The identity, which keeps something for backward that nobody needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.new_zeros(1, 123, 4567))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _hoarding(model: nn.Module, **_: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda _m, _given, made: _Hoard.apply(made))  # type: ignore[union-attr]


def test_a_tensor_that_only_the_compiled_side_saves_is_named(
    cell: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work._COMPILERS, "layers", _hoarding)
    found = cell(compile="layers")
    assert found.verdict == "caveat"
    assert "more than eager: saved 2.14 MiB; extra at the peak: 2.14 MiB saved:" in found.verdict_reason
    assert "[1, 123, 4567] float32" in found.verdict_reason
    assert number(found, "compiled_saved_bytes") - number(found, "eager_saved_bytes") == 123 * 4567 * 4


def test_less_memory_and_a_wrong_gradient_is_a_mismatch(
    cell: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: nn.Module, **_: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[union-attr]

    monkeypatch.setitem(work._COMPILERS, "layers", wrong)
    found = cell(compile="layers")
    assert found.verdict == "mismatch"
    assert "down_proj.weight" in found.verdict_reason
    monkeypatch.setitem(work._COMPILERS, "layers", lambda _model, **_: None)
    assert cell(compile="layers").verdict == "ok"
    assert cell(compile="layers", check=False).verdict == "no_reference"


def test_what_inductor_saves_is_named_by_its_graph(cell: Callable[..., Result]) -> None:
    found = cell(compile="mlp")
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    assert number(found, "compiled_saved_bytes") != number(found, "eager_saved_bytes")
    named = [str(v) for k, v in found.facts.items() if k.startswith("compiled_largest_")]
    assert any("mm" in one and "modeling_qwen2.py" in one for one in named), named


def test_saved_bytes_are_exact_and_views_count_once() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.ones(16, 4)
    held = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    with saving(module, held, None) as found:
        kept = module(x)
    assert found.total_bytes == 16 * 8 * 4  # ReLU's output, which ReLU and the second layer both save
    assert list(found.names.values()) == [next(iter(found.names.values()))]
    assert "[16, 8] float32" in next(iter(found.names.values()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    del kept


def test_the_peak_of_a_cpu_is_that_of_its_allocations(tmp_path: Path) -> None:
    def step() -> None:
        first = torch.zeros(1000, 1000)
        second = first + first  # no scalar, whose four bytes would count
        del first
        third = second * second
        del second, third

    events = recorded(step, "cpu", tmp_path)
    peak = peak_of(events)
    assert peak.bytes == 2 * 4_000_000
    assert {events[at].where for at in peak.live} <= {"aten::zeros", "aten::add", "aten::mul"}
    assert not list(tmp_path.iterdir())


def test_the_ledger_forgets_what_it_did_not_see_allocated() -> None:
    events = [
        Event(address=9, bytes=-50),
        Event(address=1, bytes=100, where="a"),
        Event(address=2, bytes=30, where="b"),
        Event(address=1, bytes=-100),
        Event(address=1, bytes=90, where="c"),
    ]
    peak = peak_of(events)
    assert (peak.bytes, [events[at].where for at in peak.live]) == (130, ["a", "b"])
    assert last_at(events) == {1: 4, 2: 2}
    assert peak_of([]).live == ()


def test_extra_blocks_are_those_without_a_counterpart() -> None:
    base = [Block(bytes=2**20, kind="saved", name="x"), Block(bytes=8, kind="temporary", name="t")]
    more = [*base, Block(bytes=2**20, kind="saved", name="y"), Block(bytes=2**20, kind="saved", name="y")]
    assert largest(extra(more, base), 1) == ["2 x 1.00 MiB saved: y"]
    assert extra(base, more) == []
    assert by_kind(more) == {"saved": 3 * 2**20, "temporary": 8}


def test_a_gpus_history_is_read_by_the_line_that_asked() -> None:
    frames = [
        {"filename": "", "line": 0, "name": "?"},
        {"filename": "/x/torch/nn/modules/linear.py", "line": 7, "name": "forward"},
        {"filename": "/x/transformers/modeling_qwen2.py", "line": 47, "name": "forward"},
    ]
    trace = [
        {"action": "segment_alloc", "addr": 1, "size": 2**21},
        {"action": "alloc", "addr": 1, "size": 512, "frames": frames},
        {"action": "free_requested", "addr": 1, "size": 512},
        {"action": "free_completed", "addr": 1, "size": 512},
        {"action": "alloc", "addr": 1, "size": 1024, "frames": []},
    ]
    assert events_of_history(trace) == [
        Event(address=1, bytes=512, where="modeling_qwen2.py:47 forward"),
        Event(address=1, bytes=-512),
        Event(address=1, bytes=1024, where="no Python frame: autograd's backward"),
    ]


def test_a_trace_is_read_by_the_operator_around() -> None:
    def memory(ts: float, index: int, device: int = 0) -> dict[str, Any]:
        arguments = {"Bytes": 8, "Addr": index, "Device Type": device, "Ev Idx": index}
        return {"name": "[memory]", "ts": ts, "tid": 1, "args": arguments}

    def operator(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"name": name, "cat": "cpu_op", "ph": "X", "ts": ts, "dur": dur, "tid": 1}

    trace = [
        operator("aten::add", 10, 10),
        operator("aten::empty_like", 12, 2),
        memory(13, 0),
        memory(18, 1),
        memory(30, 2),
        memory(31, 3, device=1),
    ]
    assert [e.where for e in events_of_trace(trace)] == ["aten::add", "aten::add", "outside of operators"]


def test_combinations_that_cannot_be_are_skips_or_refused() -> None:
    cudagraphs = BackwardMemoryAxes(mode="reduce-overhead")
    assert "cudagraphs, which are for CUDA" in backward_memory.skip(cudagraphs, "cpu")
    assert "without anything to compile" in backward_memory.skip(
        BackwardMemoryAxes(compile="none", mode="max-autotune"), "cuda"
    )
    done = harness("backward-memory", "seq=2", module="harness.probe")
    assert done.returncode == 2
    assert "seq" in done.stdout + done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_suites_are_valid(device: Any) -> None:
    suite = suites.load(suites.find("backward-memory", device), table(), device)
    assert any(not one.skip for one in suite.cells)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_history_explains_the_allocators_peak(cell: Callable[..., Result]) -> None:
    found = cell(device="cuda", seq=512, dtype="fp16")
    assert found.status == "ok", found.reason
    peak, explained = number(found, "eager_peak_bytes"), number(found, "eager_explained_bytes")
    assert explained == pytest.approx(peak, rel=0.02)
    assert number(found, "eager_at_peak_saved_bytes") > 0
