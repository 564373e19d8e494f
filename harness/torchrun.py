"""`--launcher torchrun …`: ranks that torchrun starts instead of the cell's own process, on several hosts where asked.

The harness runs on every host, with the same suite and its own --node-rank; each writes every row of its own.
"""

from __future__ import annotations

import shlex

from harness.errors import HarnessError, unknown

_PLACE = "--launcher"
_OURS = ("--nproc-per-node", "--nproc_per_node", "-m", "--module", "--no-python")


def options(launcher: str) -> list[str]:
    """torchrun's options in what the user gave. Raises HarnessError unless it is "torchrun" and options for it."""
    try:
        word, *given = shlex.split(launcher)
    except ValueError as error:
        raise HarnessError(f"{_PLACE} {launcher!r}: {error}, or nothing is in it") from error
    if word != "torchrun":
        raise unknown("launcher", word, ("torchrun",), _PLACE)
    for option in given:
        if option.partition("=")[0] in _OURS or not option.startswith("--"):
            raise HarnessError(
                f"{_PLACE}: {option!r}: options of torchrun as --name=value, without {', '.join(_OURS)}: the ranks "
                "are the cell's, and what they run is ours"
            )
    if nodes(launcher) > 1 and not any(o.startswith(("--rdzv", "--master")) for o in given):
        raise HarnessError(
            f"{_PLACE}: several nodes meet somewhere: --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        )
    return given


def nodes(launcher: str) -> int:
    """How many hosts share a cell's ranks; 1 without a launcher. Raises HarnessError for what is no number."""
    for option in shlex.split(launcher):
        name, _, value = option.partition("=")
        if name == "--nnodes":
            if not value.isdecimal() or int(value) < 1:
                raise HarnessError(
                    f"{_PLACE}: --nnodes={value}: a whole number, at least 1; an elastic range is none"
                )
            return int(value)
    return 1
