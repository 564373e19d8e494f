"""Which devices a run may use. Asks NVML, never CUDA: the runner stays clean of it."""

from __future__ import annotations

import itertools
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
    # As CUDA reads it: an index that does not exist hides itself and all that follow.
    words = (word.strip() for word in chosen.split(","))
    ids = tuple(itertools.takewhile(lambda word: _exists(word, count), words))
    return ids, "" if ids else f"CUDA_VISIBLE_DEVICES is {chosen!r}: no CUDA device is visible"


def _exists(word: str, count: int) -> bool:
    if word.startswith(("GPU-", "MIG-")):
        return True
    return word.isdigit() and int(word) < count


def pick(ids: tuple[str, ...], selection: str | None) -> tuple[str, ...]:
    """The part of `ids` that "0-2,5" names by position; the first one by default. Raises HarnessError."""
    if selection is None or not ids:
        return ids[:1]
    picked: list[str] = []
    for part in selection.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise HarnessError(f"--devices {selection}: write it as 0-3 or 0,2,5")
        if last and int(last) < int(first):
            raise HarnessError(f"--devices {selection}: {part} counts down; write {last}-{first}")
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
