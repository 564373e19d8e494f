"""Which kernel serves a request, and why. Asking runs nothing."""

from __future__ import annotations

from typing import NamedTuple

from tc_volta.errors import Unsupported
from tc_volta.kernels import KERNELS
from tc_volta.request import Request


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str
    reason: str


def choose(request: Request, kernel: str = "auto") -> Choice:
    """The kernel that serves the request, with the reason. Runs nothing.

    Raises ValueError for an unknown kernel, and Unsupported for a named kernel that cannot serve: never another instead.
    """
    if kernel != "auto":
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}; there are auto, {', '.join(KERNELS)}")
        why = KERNELS[kernel].unusable(request)
        if why:
            raise Unsupported(f"kernel {kernel!r} cannot serve this call: {why}")
        return Choice(kernel, "asked for")
    passed: list[str] = []
    for name, record in KERNELS.items():
        why = record.unusable(request)
        if not why:
            return Choice(name, "; ".join(passed) or "the fastest here")
        passed.append(f"not {name}: {why}")
    raise AssertionError("the math kernel serves every request")


def usable(request: Request) -> dict[str, str]:
    """Every kernel, with "" or the reason why it cannot serve the request."""
    return {name: record.unusable(request) for name, record in KERNELS.items()}
