"""Ways of sharing a sequence: what a model's heads allow, costs against the counted bytes, which is preferred and when."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cp_volta import traffic
from cp_volta.step import Shape
from cp_volta.ways import Job, cost, prefer, ways
from harness.cells import Measure, Task
from harness.rows import Result
from probes import links
from probes.collectives import CollectiveAxes
from probes.collectives import work as collectives
from probes.cp_plan import CpPlanAxes
from probes.cp_plan.work import run
from probes.fit import shape_of
from tests.tasks import task

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
QWEN = shape_of("qwen2.5-1.5b")  # 12 query heads, 2 key/value heads


def plan(**axes: object) -> Result:
    chosen = {"model": "qwen2.5-1.5b", "card": "V100 SXM2", "link_gb_s": 100.0, **axes}
    return run(msgspec.convert(chosen, CpPlanAxes), _anywhere())


def _anywhere() -> Task:
    return task()


def _job(seq: int, ranks: int, shape: Shape = QWEN) -> Job:
    return Job(shape=shape, seq=seq, ranks=ranks)


def test_every_split_of_the_ranks_is_a_way_and_what_cannot_be_says_why() -> None:
    found = {way.name: way for way in ways(_job(32_768, 4))}
    assert list(found) == ["ulysses", "hybrid 2x2", "hybrid-contiguous 2x2", "ring", "ring-contiguous"]
    assert not any(way.why_not for way in found.values())
    odd = {way.name: way.why_not for way in ways(_job(32_772, 4))}
    assert odd["ring"] == "32,772 tokens do not divide into 8 parts; pad to 32,776"
    assert not odd["ring-contiguous"]
    many = {way.name: way.why_not for way in ways(_job(32_768, 16))}
    assert many["ulysses"] == "12 query heads do not serve 16 ranks"
    assert ways(_job(512, 1)) == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_are_those_that_the_runs_count(ranks: int) -> None:
    """cp-step and cp-parity hold `traffic` against what was really sent."""
    for way in ways(_job(49_152, ranks)):
        assert not way.why_not
        each = [
            traffic.attention(
                batch=1,
                seq=49_152,
                dim=128,
                itemsize=2,
                query=12,
                kv=2,
                ring_ranks=way.ring,
                ulysses_ranks=way.ulysses,
                rank=rank,
            )
            for rank in range(ranks)
        ]
        assert way.forward_bytes == max(one.forward for one in each)
        assert way.backward_bytes == max(one.backward for one in each)


def test_imbalance_is_that_of_scores_and_of_heads() -> None:
    found = {way.name: way.imbalance for way in ways(_job(49_152, 8))}
    assert found["ring"] == 1.0
    assert found["ring-contiguous"] == 15 / 8
    assert found["ulysses"] == pytest.approx(2 * 8 / 12)  # 12 heads on 8 ranks: two on the busiest


def test_a_slow_link_prefers_what_hides_and_short_blocks_cannot_hide() -> None:
    """At length, a ring's hops pass while blocks compute; over few tokens on fast cards they are waited for."""
    long, short = _job(262_144, 4), _job(4_096, 4)
    rates: dict[str, float] = {"flops_per_s": 60e12, "link_bytes_per_s": 10e9}
    at_length = {w.name: cost(long, w, **rates) for w in ways(long)}
    assert at_length["ring"].waiting_s == 0 < at_length["ulysses"].waiting_s
    best = prefer(long, ways(long), **rates)
    assert best is not None
    assert best[0].name == "ring"
    over_few = {w.name: cost(short, w, **{**rates, "flops_per_s": 600e12}) for w in ways(short)}
    assert over_few["ring"].waiting_s > 0
    best = prefer(short, ways(short), **{**rates, "flops_per_s": 600e12})
    assert best is not None
    assert best[0].name == min(over_few, key=lambda name: over_few[name].total_s)


def test_the_row_names_its_assumptions_and_every_way() -> None:
    found = plan(cp_size=4)
    assert found.verdict == "ok"
    assert found.verdict_reason.startswith(f"prefer {found.facts['preferred']}: ")
    assert "nothing was run" in found.notes[0]
    assert "100 GB/s between ranks (given)" in found.notes[0]
    assert len(found.notes) == 6
    with_more = plan(cp_size=8)
    less, more = (f.facts["predicted_peak_bytes"] for f in (with_more, found))
    assert 0 < less < more  # type: ignore[operator]


def test_without_a_way_or_a_rate_there_is_no_preference() -> None:
    found = plan(seq=32_768, cp_size=3)
    assert found.status == "unsupported"
    assert "do not divide into 3 parts" in found.reason
    assert plan(card="Voodoo 2").status == "unsupported"


class _Nvml(types.SimpleNamespace):
    """A driver with so many NVLinks up; tests/fake_nvml.py stands in for whole machines."""

    NVMLError = RuntimeError

    def __init__(self, up: int, version: int) -> None:
        super().__init__()
        self.up, self.version = up, version

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetNvLinkState(self, handle: int, number: int) -> bool:
        if number >= 6:
            raise RuntimeError("no such link")
        return number < self.up

    def nvmlDeviceGetNvLinkVersion(self, handle: int, number: int) -> int:
        return self.version

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8


def test_links_are_read_from_the_driver() -> None:
    assert links._nvlink(_Nvml(6, 2)) == (150.0, "6 links of NVLink version 2")
    assert links._nvlink(_Nvml(0, 2)) is None
    assert links._pcie(_Nvml(0, 0)).gb_s == pytest.approx(15.75, rel=0.01)


@pytest.mark.parametrize("kind", list(collectives.CALLS))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_collective_is_right_and_timed(tmp_path: Path, kind: str, dtype: str) -> None:
    axes = msgspec.convert({"kind": kind, "cp_size": 3, "mib": 0.01, "dtype": dtype}, CollectiveAxes)
    found = collectives.run(axes, task(measure=Measure(steps=2), folder=tmp_path))
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["gb_s_sent_by_each_rank"] > 0  # type: ignore[operator]
    assert found.facts["fastest_s"] <= found.facts["slowest_s"]  # type: ignore[operator]


@pytest.mark.parametrize("kind", list(collectives.CALLS))
def test_one_wrong_element_on_one_rank_is_a_mismatch_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real = collectives.CALLS[kind]

    def off(x: Any, rank: int, size: int) -> Any:
        out = real(x, rank, size).clone()
        if rank == 1:
            out[7] += 1
        return out

    monkeypatch.setitem(collectives.CALLS, kind, off)
    axes = msgspec.convert({"kind": kind, "mib": 0.01}, CollectiveAxes)
    found = collectives.run(axes, task(measure=Measure(steps=2), folder=tmp_path))
    assert found.verdict == "mismatch"
    assert "1 elements are wrong; rank 1: element 7 is" in found.verdict_reason
