"""What NVML says of a GPU, and that its silence is no error."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from probes import gpu_state


class NVMLError(Exception):
    """As pynvml's."""


@dataclass(frozen=True)
class Card:
    uuid: str = "GPU-1f2e3d4c-0000"
    reasons: int = 0
    pids: tuple[int, ...] = (os.getpid(),)
    silent: tuple[str, ...] = ()  # calls that this card, or slice of one, does not answer


class Nvml:
    """The part of pynvml that `gpu_state` asks."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *cards: Card, init: str = "") -> None:
        self.cards, self.init, self.closed = cards, init, False

    def nvmlInit(self) -> None:
        if self.init:
            raise NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if index >= len(self.cards):
            raise NVMLError("Invalid Argument")
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise NVMLError("Not Found")

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3"

    def __getattr__(self, name: str) -> object:
        def ask(card: Card, *_: object) -> object:
            if name in card.silent:
                raise NVMLError("Not Supported")
            return self._readings(card)[name]

        return ask

    def _readings(self, card: Card) -> dict[str, object]:
        return {
            "nvmlDeviceGetClockInfo": 1_530,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 287_500,
            "nvmlDeviceGetEnforcedPowerLimit": 300_000,
            "nvmlDeviceGetCurrentClocksEventReasons": card.reasons,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in card.pids
            ],
        }


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> object:
    def put(fake: object, visible: str | None = None) -> object:
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


def test_readings_carry_their_units(nvml) -> None:  # type: ignore[no-untyped-def]
    fake = nvml(Nvml(Card()))
    state = gpu_state.read()
    assert state is not None
    assert (state.sm_clock_mhz, state.temperature_c, state.power_w, state.power_limit_w) == (
        1530,
        61,
        287.5,
        300,
    )
    assert state.throttle_reasons == ()
    assert state.foreign_processes == ()
    assert fake.closed


def test_no_library_no_driver_and_no_such_card_are_none(nvml) -> None:  # type: ignore[no-untyped-def]
    nvml(None)  # makes `import pynvml` raise ImportError
    assert gpu_state.read() is None
    nvml(Nvml(init="Driver Not Loaded"))
    assert gpu_state.read() is None
    nvml(Nvml(Card()), visible="GPU-ffff")
    assert gpu_state.read() is None


def test_idle_and_chosen_clocks_are_no_throttling_and_the_others_are_named(nvml) -> None:  # type: ignore[no-untyped-def]
    nvml(Nvml(Card(reasons=0x1 | 0x2)))
    assert gpu_state.read().throttle_reasons == ()  # type: ignore[union-attr]
    nvml(Nvml(Card(reasons=0x4 | 0x40)))
    assert gpu_state.read().throttle_reasons == ("software power cap", "hardware thermal slowdown")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("visible", "index", "temperature_of"),
    [("1", 0, 1), ("1,0", 1, 0), ("GPU-b000", 0, 1), ("GPU-b", 0, 1), ("MIG-c000", 0, 2), ("", 0, 0)],
)
def test_the_visible_devices_decide_which_card_is_read(
    nvml, visible: str, index: int, temperature_of: int
) -> None:  # type: ignore[no-untyped-def]
    """Numbers, UUIDs, beginnings of UUIDs, and MIG slices, which crash other tools (zeus#109)."""
    cards = [
        Card(uuid="GPU-a000", reasons=0x4),
        Card(uuid="GPU-b000", reasons=0x8),
        Card(uuid="MIG-c000", reasons=0x20),
    ]
    nvml(Nvml(*cards), visible=visible)
    words = ("software power cap", "hardware slowdown", "software thermal slowdown")
    assert gpu_state.read(index).throttle_reasons == (words[temperature_of],)  # type: ignore[union-attr]


def test_what_a_slice_does_not_tell_is_null_and_the_rest_is_there(nvml) -> None:  # type: ignore[no-untyped-def]
    silent = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetClockInfo")
    nvml(Nvml(Card(silent=(*silent, "nvmlDeviceGetCurrentClocksThrottleReasons"))))
    state = gpu_state.read()
    assert state is not None
    assert (state.power_w, state.sm_clock_mhz, state.throttle_reasons) == (None, None, ())
    assert state.temperature_c == 61


def test_others_on_the_card_are_named(nvml) -> None:  # type: ignore[no-untyped-def]
    nvml(Nvml(Card(pids=(os.getpid(), 71))))
    assert gpu_state.read().foreign_processes == (f"71 python3 {1 << 30}",)  # type: ignore[union-attr]


def test_a_container_that_numbers_processes_otherwise_has_no_neighbour_in_itself(nvml) -> None:  # type: ignore[no-untyped-def]
    nvml(Nvml(Card(pids=(999_991,))))
    assert gpu_state.read().foreign_processes == ()  # type: ignore[union-attr]
    nvml(Nvml(Card(pids=(999_991, 999_992))))
    assert "which of 2 is ours is not known" in gpu_state.read().foreign_processes[0]  # type: ignore[union-attr]
