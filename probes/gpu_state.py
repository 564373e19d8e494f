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
    """The state of the index-th visible GPU; None without NVML, without a driver, or for a GPU NVML does not find."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _state(pynvml, _handle(pynvml, index))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> Any:
    """The handle behind CUDA_VISIBLE_DEVICES, whose entries are numbers, UUIDs, or UUIDs of MIG slices.

    CUDA takes the beginning of a UUID as well; NVML wants all of it. Raises NVMLError.
    """
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    word = visible[index] if index < len(visible) else str(index)
    if word.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(word))
    try:
        return nvml.nvmlDeviceGetHandleByUUID(word)
    except nvml.NVMLError:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        matching = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(word)]
        if len(matching) != 1:
            raise
        return matching[0]


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
        foreign_processes=_foreign(nvml, ask("nvmlDeviceGetComputeRunningProcesses") or []),
    )


def _foreign(nvml: Any, processes: list[Any]) -> tuple[str, ...]:
    """The others on this GPU. Ours is recognised by its pid, which a container may number differently."""
    ours = [process for process in processes if process.pid == os.getpid()]
    if not ours and len(processes) <= 1:
        return ()  # the one that is there is this cell, under the host's number; or none is shown at all
    if not ours:
        return (f"{len(processes) - 1} more; in a container, which of {len(processes)} is ours is not known",)
    return tuple(_words(nvml, process) for process in processes if process.pid != os.getpid())


def _words(nvml: Any, process: Any) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(process.pid)
    except (nvml.NVMLError, AttributeError):
        name = "?"
    return f"{process.pid} {os.path.basename(name)} {process.usedGpuMemory or 0}"
