"""Whether a checkpointed layer is being computed for the second time, for its gradients alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Now(threading.local):
    second = False


_NOW = _Now()


@contextlib.contextmanager
def second_forward() -> Iterator[None]:
    """Inside, what a layer's last operation returns is thrown away; only what it saves for backward counts."""
    before, _NOW.second = _NOW.second, True
    try:
        yield
    finally:
        _NOW.second = before


def recomputing() -> bool:
    """Whether this thread is inside `second_forward`. False under torch.compile, whose graphs drop unused work."""
    return False if torch.compiler.is_compiling() else _NOW.second
