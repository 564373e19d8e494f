"""Which devices a run may use. Asks NVML, never CUDA: the runner stays clean of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from harness.cells import Device
from harness.errors import HarnessError


def here() -> Device:
    """The device whose default suite this machine runs."""
    return "cuda" if cuda_ids()[0] else "cpu"


def cuda_ids(caller: Mapping[str, str] = os.environ) -> tuple[tuple[str, ...], str]:
    """Ids for CUDA_VISIBLE_DEVICES, or () and the reason."""
    count, why = _nvml_count()
    chosen = caller.get("CUDA_VISIBLE_DEVICES")
    if not count:
        return (), f"no CUDA device here: {why}"
    if chosen is None:
        return tuple(str(i) for i in range(count)), ""
    ids = tuple(word.strip() for word in chosen.split(",") if word.strip())
    return ids, "" if ids else "CUDA_VISIBLE_DEVICES is empty: no CUDA device is visible"


def pick(ids: tuple[str, ...], selection: str | None) -> tuple[str, ...]:
    """The part of `ids` that "0-2,5" names by position; the first one by default. Raises HarnessError."""
    if selection is None or not ids:
        return ids[:1]
    picked: list[str] = []
    for part in selection.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise HarnessError(f"--devices {selection}: write it as 0-3 or 0,2,5")
        for i in range(int(first), int(last or first) + 1):
            if i >= len(ids):
                raise HarnessError(
                    f"--devices {selection}: there is no device {i}; visible: 0-{len(ids) - 1}"
                )
            if ids[i] not in picked:
                picked.append(ids[i])
    return tuple(picked)


def _nvml_count() -> tuple[int, str]:
    try:
        import pynvml
    except ImportError:
        return 0, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return 0, f"NVML says {error}"
    return count, "" if count else "NVML counts none"
