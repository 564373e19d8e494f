"""A large card answers for a small one: the allocator is held to a memory budget less what the context takes."""

from __future__ import annotations

import torch

GIB = 1 << 30


class TooSmall(ValueError):
    """The budget does not even hold the CUDA context."""


def cap(budget_gib: float) -> dict[str, int]:
    """Hold this process to `budget_gib` GiB of the device. Call before anything is allocated.

    A small card would hold the driver's context too, so the allocator gets the budget less what is in use before
    the first tensor. Returns the figures, as facts of the row. Raises TooSmall where nothing would be left, and
    ValueError for a budget above the card.
    """
    torch.cuda.init()
    torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    allowed = int(budget_gib * GIB) - context
    if allowed <= 0:
        raise TooSmall(f"a budget of {budget_gib:g} GiB; the CUDA context takes {context / GIB:.2f}")
    if allowed + context > total:
        raise TooSmall(f"a budget of {budget_gib:g} GiB; this card has {total / GIB:.1f}")
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return {"budget_bytes": int(budget_gib * GIB), "context_bytes": context, "cap_bytes": allowed}


def uncap() -> None:
    """The whole card again, for the check beside the measurement."""
    torch.cuda.set_per_process_memory_fraction(1.0)
