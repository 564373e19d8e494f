"""cp-step and cp-parity: verdicts that turn when something is wrong, lost ranks by name, skips with their reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import cp_volta.ring
from harness.cells import Measure, Task
from harness.rows import Collective, Result
from probes import cp_parity, cp_step, ranks
from probes.cp_parity import CpParityAxes
from probes.cp_parity.work import judge
from probes.cp_parity.work import run as run_parity
from probes.cp_step import CpStepAxes
from probes.cp_step.exposed import merged, uncovered
from probes.cp_step.work import run as run_step
from reports import details
from tests.tasks import task
from tests.test_reports_groups import only
from tests.test_reports_sample import row

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SMALL = {"seq": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}


def _task(folder: Path) -> Task:
    return task(measure=Measure(steps=1, warmup_steps=0, timeout_s=60), folder=folder)


def parity(folder: Path, **axes: object) -> Result:
    return run_parity(msgspec.convert({**SMALL, **axes}, CpParityAxes), _task(folder))


def step(folder: Path, **axes: object) -> Result:
    chosen = {"model": "tiny-qwen2-4h", "seq": 64, **axes}
    return run_step(msgspec.convert(chosen, CpStepAxes), _task(folder))


def _dies(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return rank


def _raises(rank: int) -> int:
    if rank == 2:
        raise torch.OutOfMemoryError("no more")
    time.sleep(60)
    return rank


def test_a_lost_rank_ends_all_at_once_and_by_name(tmp_path: Path) -> None:
    axes = CpParityAxes(cp_size=3)
    began = time.monotonic()
    found = ranks.result(_dies, 3, (), axes=axes, task=_task(tmp_path))
    assert isinstance(found, Result)
    assert (found.status, found.reason) == ("crashed", "rank 1 of 3 ended with SIGKILL")
    assert time.monotonic() - began < 20
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # the others are gone and reaped


def test_a_rank_that_raises_is_the_rows_reason(tmp_path: Path) -> None:
    found = ranks.result(_raises, 3, (), axes=CpParityAxes(cp_size=3), task=_task(tmp_path))
    assert isinstance(found, Result)
    assert (found.status, found.reason) == ("oom", "rank 2: OutOfMemoryError: no more")


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_parity_is_ok_and_its_errors_are_facts(tmp_path: Path, mode: str) -> None:
    found = parity(tmp_path, mode=mode)
    assert found.verdict == "ok", found.verdict_reason
    for name in ("out", "dq", "dk", "dv"):
        assert 0 < found.facts[f"{name}_error"] < 2e-6  # type: ignore[operator]
    assert found.facts["bytes_forward"] == found.facts["bytes_forward_by_formula"]


def test_a_backward_that_reads_the_first_ranks_keys_is_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers #14265, planted: keys go round in forward, and stay at home in backward."""
    real = cp_volta.ring.flash_attn_backward
    first: list[Any] = []

    def stale(dout: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        first.append((k, v))
        k, v = first[0] if k.shape == first[0][0].shape else (k, v)
        return real(dout, q, k, v, *rest, **more)

    monkeypatch.setattr(cp_volta.ring, "flash_attn_backward", stale)
    found = parity(tmp_path, mode="ring-contiguous")
    assert found.verdict == "mismatch"
    assert "dq" in found.verdict_reason or "dk" in found.verdict_reason


def test_the_judge_names_the_worst_tensor_and_admits_no_nan() -> None:
    small = dict.fromkeys(("out", "dq", "dk", "dv"), 1e-7)
    assert judge(small, 2e-6, True)[0] == "ok"
    assert judge({**small, "dk": 1e-3}, 2e-6, True) == ("mismatch", "dk: error 1.00e-03, the bar is 2.0e-06")
    assert judge({**small, "dv": float("nan")}, 2e-6, True) == ("nonfinite", "dv is not finite")
    assert judge(small, 2e-6, False)[0] == "mismatch"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_whole_model_trains_as_on_one_device(tmp_path: Path, dtype: str) -> None:
    found = run_parity(
        CpParityAxes(mode="ring", cp_size=2, dtype=dtype, seq=64, model="tiny-qwen2-4h", updates=4),  # type: ignore[arg-type]
        _task(tmp_path),
    )
    assert found.verdict == "ok", found.verdict_reason
    assert len(found.loss) == 4
    assert found.facts["cosine_of_all_updates"] > 0.99  # type: ignore[operator]


def test_gradients_that_no_rank_sums_are_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_volta.reduce_gradients", lambda model, cp: None)
    found = run_parity(
        CpParityAxes(mode="ring", cp_size=2, seq=64, model="tiny-qwen2-4h", updates=1), _task(tmp_path)
    )
    assert found.verdict == "mismatch"
    (again := tmp_path / "again").mkdir()
    assert step(again, mode="ring").verdict == "mismatch"


@pytest.mark.parametrize(
    "axes",
    [
        {"mode": "none", "cp_size": 1},
        {"mode": "ring", "checkpointing": True},
        {"mode": "hybrid", "cp_size": 4, "step": "full"},
        {"mode": "ulysses", "sharding": "fsdp2", "step": "full", "dtype": "fp16"},
    ],
)
def test_a_step_is_checked_and_counted(tmp_path: Path, axes: dict[str, object]) -> None:
    found = step(tmp_path, **axes)
    assert found.verdict == "ok", found.verdict_reason
    size = int(axes.get("cp_size", 2))  # type: ignore[call-overload]
    assert found.facts["bytes_sent"] == found.facts["bytes_by_formula"]
    assert (found.facts["bytes_sent"] == 0) == (size == 1)
    assert [n for n in found.facts if n.endswith("_peak_bytes")] == [
        f"rank{r}_peak_bytes" for r in range(size)
    ]
    assert bool(found.notes[1:]) == (size > 1)  # that they share one processor


def test_bytes_that_are_not_the_formulas_are_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.cp_step.work.expected_bytes", lambda config, axes, rank: 1)
    found = step(tmp_path, mode="ring")
    assert (found.verdict, found.verdict_reason.partition(",")[0]) == (
        "mismatch",
        "bytes sent by rank [49152",
    )


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"mode": "none"}, "mode none is cp_size 1"),
        ({"mode": "hybrid", "cp_size": 3}, "hybrid is 2 x a ring"),
        ({"mode": "ring", "seq": 66}, "66 tokens do not divide into 4 parts"),
        ({"mode": "ulysses", "cp_size": 8}, "4 query heads do not serve 8 ranks"),
        ({"attention": "efficient"}, "efficient is for CUDA"),
        ({"step": "full", "dtype": "fp16"}, "GradScaler refuses fp16 parameters"),
        ({"compile": "model", "sharding": "fsdp2"}, "break a graph"),
    ],
)
def test_what_cannot_be_is_a_skip_with_its_reason(axes: dict[str, object], words: str) -> None:
    chosen = msgspec.convert({"model": "tiny-qwen2-4h", "seq": 64, **axes}, CpStepAxes)
    assert cp_step.PROBE.skip
    assert words in cp_step.PROBE.skip(chosen, "cpu")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"updates": 3}, "updates are a model's"),
        ({"model": "tiny-qwen2-4h"}, "updates has to be 1 or more"),
        ({"model": "tiny-qwen2-4h", "updates": 1, "heads": 4}, "attention layer's"),
        ({"model": "tiny-qwen", "updates": 1}, "tiny-qwen"),
    ],
)
def test_axes_that_contradict_are_refused(axes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        msgspec.convert(axes, CpParityAxes)


def test_each_rank_needs_a_gpu_but_over_gloo() -> None:
    assert cp_parity.PROBE.devices
    assert cp_parity.PROBE.devices(CpParityAxes(cp_size=4)) == 4
    assert cp_parity.PROBE.devices(CpParityAxes(cp_size=4, backend="gloo")) == 1


def test_time_that_nothing_covers() -> None:
    collectives = merged([(0, 4), (3, 6), (10, 12)])
    assert collectives == [(0, 6), (10, 12)]
    assert uncovered(collectives, merged([(1, 2), (5, 11)])) == 6 + 2 - (1 + 1 + 1)
    assert uncovered(collectives, []) == 8
    assert uncovered([], merged([(1, 2)])) == 0


def test_the_table_of_ranks_has_scaling_only_where_each_has_a_device() -> None:
    def cell(mode: str, size: int, devices: int, tok_s: float) -> Any:
        facts: dict[str, Any] = {"devices": devices, "bytes_sent": 2**20, "bytes_by_formula": 2**20}
        facts |= {f"rank{rank}_peak_bytes": (rank + 1) * 2**30 for rank in range(size)}
        return row(
            tok_s=tok_s,
            probe="cp-step",
            attention="auto",
            more={"mode": mode, "cp_size": size},
            facts=facts,
            collectives={"rotate": Collective(calls=6, bytes_sent=2**20, seconds=0.5)},
        )

    baseline = {"mode": "none", "cp_size": 1}
    table = details.ranks(
        only(cell("none", 1, 1, 100), cell("ring", 2, 2, 180), cell("ulysses", 2, 1, 90), baseline=baseline)
    )
    heads = [column.name for column in table.columns]
    lines = {(line[0], line[1]): dict(zip(heads, line, strict=True)) for line in table.rows}
    ring, shared = lines["ring", "2"], lines["ulysses", "2"]
    assert (ring["tok/s per device"], ring["efficiency"]) == ("90.0", "0.90x")
    assert ring["peak GiB of each rank"] == "1.00 2.00"
    assert ring["collectives: calls, host's seconds"] == "rotate 6x, 0.500 s"
    assert shared["efficiency"] == "–"
