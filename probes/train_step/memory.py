"""Memory that runs out inside a cell: recognised, told with its numbers, and survived."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")
# Also inside another error's text: a compiler that wraps what its autotuning ran into.
_WORDS = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory")


def out_of_memory(error: BaseException) -> str:
    """The line that tells what was asked for, if the error is about memory; else "".

    torch raises OutOfMemoryError for a device and a plain RuntimeError for the host.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in text for words in _WORDS):
        lines = [line.strip() for line in text.splitlines()] or [type(error).__name__]
        telling = (line for line in lines if any(words in line for words in _WORDS))
        return next(telling, lines[0])[:400]
    return ""


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` returns and "", or None and which memory was short. Other errors pass through.

    The failed try's frames, and the tensors they held, are gone when this returns.
    """
    try:
        return work(), ""
    except (MemoryError, RuntimeError) as error:
        why = out_of_memory(error)
        if not why:
            raise
    gc.collect()
    release()
    return None, why


def release() -> None:
    """Give back what the caching allocator holds for later; nothing to do without CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """What can still be allocated: on a host, without the kernel ending a process for it."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + int(cached)
    return int(psutil.virtual_memory().available)
