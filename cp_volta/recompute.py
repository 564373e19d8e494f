"""Whether a checkpointed layer is being computed for the second time, for its gradients alone."""

from __future__ import annotations

import threading

import torch


class _Now(threading.local):
    depth = 0


_NOW = _Now()


class SecondForward:
    """A context: what a layer's last operation returns is thrown away; only what it saves for backward counts.

    One object can be entered again and again, as a graph that is kept for a second backward does.
    """

    def __enter__(self) -> None:
        _NOW.depth += 1

    def __exit__(self, *exception: object) -> None:
        _NOW.depth -= 1


def recomputing() -> bool:
    """Whether this thread is in a `SecondForward`. False under torch.compile, whose graphs drop unused work."""
    return False if torch.compiler.is_compiling() else _NOW.depth > 0
