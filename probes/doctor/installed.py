"""Versions without imports, and one place that imports torch and says why it cannot."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import warnings
from types import ModuleType


def version(distribution: str) -> str | None:
    """The installed version, or None. Reads metadata only."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(text: str | None) -> tuple[int, ...]:
    """`3.7.1+git` -> (3, 7, 1); () for None."""
    return tuple(int(part) for part in re.findall(r"\d+", (text or "").split("+")[0])[:4])


@functools.cache
def torch_or_reason() -> tuple[ModuleType | None, str]:
    """(torch, "") or (None, why not)."""
    return module_or_reason("torch")


def module_or_reason(name: str) -> tuple[ModuleType | None, str]:
    """Import a module. A broken build fails in more ways than ImportError, and the doctor says which."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), ""
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        first = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {first[0][:200]}"


@functools.cache
def cuda_state() -> tuple[int, str]:
    """(number of CUDA devices that torch can use, torch's own words where that is none or doubtful)."""
    torch, reason = torch_or_reason()
    if torch is None:
        return 0, reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index in range(count):
            torch.cuda.get_device_capability(index)  # warns about a card without kernels
    words = " ".join(" ".join(str(one.message).split()) for one in caught)
    return count, words[:400]
