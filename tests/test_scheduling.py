"""Cells are packed onto devices: each has its own alone, and the row names who ran beside it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from harness import devices
from harness.errors import HarnessError
from tests.conftest import Ran
from tests.sample import HEAD, PROBE

CUDA = HEAD.replace('"cpu"', '"cuda"')
SLEEPERS = CUDA + '[axes]\ndo = ["sleep"]\ns = [0.4]\nn = [0, 1, 2, 3]\n'


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with four; the cells of these tests only look at CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(devices, "cuda_ids", lambda: (("4", "5", "GPU-a", "GPU-b"), ""))


@pytest.mark.usefixtures("four_gpus")
def test_timed_cells_are_packed_one_to_a_device_and_name_their_neighbours(
    run_suite: Callable[..., Ran],
) -> None:
    timed = msgspec.structs.replace(PROBE, timed=True)
    rows = run_suite(SLEEPERS, timed, devices="0-3").rows
    assert sorted(r.isolation.devices for r in rows) == [("4",), ("5",), ("GPU-a",), ("GPU-b",)]
    assert all(r.facts["visible"] == r.isolation.devices[0] for r in rows)
    assert all(len(r.isolation.neighbours) == 3 for r in rows)


@pytest.mark.usefixtures("four_gpus")
def test_one_device_is_used_unless_more_are_named(run_suite: Callable[..., Ran]) -> None:
    rows = run_suite(SLEEPERS).rows
    assert {r.isolation.devices for r in rows} == {("4",)}
    assert all(r.isolation.neighbours == () for r in rows)


@pytest.mark.usefixtures("four_gpus")
def test_a_cell_of_two_devices_takes_two_and_one_of_five_is_a_skip(run_suite: Callable[..., Ran]) -> None:
    claims = msgspec.structs.replace(PROBE, devices=lambda axes: 2 if getattr(axes, "n", 0) < 3 else 5)
    ran = run_suite(SLEEPERS, claims, devices="0-3")
    assert {len(ran.row(n=n).isolation.devices) for n in (0, 1, 2)} == {2}
    assert not set(ran.row(n=0).isolation.devices) & set(ran.row(n=1).isolation.devices)
    assert ran.row(n=3).reason == "needs 5 devices; 4 here"


def test_without_a_device_every_cell_is_a_skip_with_the_reason(
    run_suite: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cuda_ids", lambda: ((), "no CUDA device here: a test"))
    rows = run_suite(SLEEPERS).rows
    assert {(r.status, r.reason) for r in rows} == {("skipped", "no CUDA device here: a test")}


@pytest.mark.parametrize(
    ("selection", "picked"), [(None, "a"), ("0-2", "abc"), ("2,0", "ca"), ("1-1,1", "b")]
)
def test_devices_are_picked_by_position(selection: str | None, picked: str) -> None:
    assert devices.pick(("a", "b", "c"), selection) == tuple(picked)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("3", "there is no device 3; visible: 0-2"),
        ("x", "write it as"),
        ("2-1", "2-1 counts down; write 1-2"),
    ],
)
def test_devices_that_are_not_there_are_refused(selection: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        devices.pick(("a", "b", "c"), selection)


def test_the_callers_own_selection_is_what_positions_refer_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvml_count", lambda: (8, ""))
    assert devices.cuda_ids({"CUDA_VISIBLE_DEVICES": "7, MIG-x"}) == (("7", "MIG-x"), "")
    assert devices.cuda_ids({"CUDA_VISIBLE_DEVICES": ""})[0] == ()
    assert devices.cuda_ids({"CUDA_VISIBLE_DEVICES": "-1"}) == (
        (),
        "CUDA_VISIBLE_DEVICES is '-1': no CUDA device is visible",
    )
    assert devices.cuda_ids({"CUDA_VISIBLE_DEVICES": "2,9,3"})[0] == ("2",), "as CUDA reads it"
    assert devices.cuda_ids({})[0] == tuple("01234567")


def test_measured_rows_stay_where_their_device_is_gone(
    run_suite: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import fingerprint

    monkeypatch.setattr(devices, "cuda_ids", lambda: (("0",), ""))
    run_suite(SLEEPERS)
    monkeypatch.setattr(devices, "cuda_ids", lambda: ((), "no CUDA device here: a test"))
    digests = fingerprint.digests
    monkeypatch.setattr(fingerprint, "digests", lambda parts: {**digests(parts), "device": "0" * 12})
    assert {r.status for r in run_suite(SLEEPERS).rows} == {"ok"}
