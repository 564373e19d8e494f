"""Clocks, temperature, power, throttling and neighbours of one GPU, from NVML. None where NVML is silent."""

from __future__ import annotations

import os
from typing import Any

from harness.rows import DeviceState

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be"; idle and the user's own
# application clocks are no throttling.
_THROTTLE = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def read(index: int = 0) -> DeviceState | None:
    """The state of the index-th visible GPU; None without NVML or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _handle(pynvml, index)
        return _state(pynvml, handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> Any:
    """The handle behind CUDA_VISIBLE_DEVICES, whose entries are numbers, UUIDs, or UUIDs of MIG slices."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    word = visible[index] if index < len(visible) else str(index)
    if word.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(word))
    return nvml.nvmlDeviceGetHandleByUUID(word)


def _state(nvml: Any, handle: Any) -> DeviceState:
    def ask(name: str, *arguments: Any) -> Any:
        """The reading, or None where this GPU, or this slice of one, has none."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return DeviceState(
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=power / 1000 if power is not None else None,
        power_limit_w=limit / 1000 if limit is not None else None,
        throttle_reasons=tuple(word for bit, word in _THROTTLE.items() if reasons & bit),
        foreign_processes=_foreign(ask("nvmlDeviceGetComputeRunningProcesses") or []),
    )


def _foreign(processes: list[Any]) -> tuple[str, ...]:
    return tuple(
        f"pid {p.pid}, {(p.usedGpuMemory or 0) >> 20} MiB" for p in processes if p.pid not in (os.getpid(), 0)
    )
