"""Standard output that outlives its reader: `| head -1`, a full disk behind `>`, a closed terminal.

A sweep of hours is not ended by the loss of its progress lines; its rows are what it is for.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Enduring:
    """sys.stdout, looked up at each call; once it cannot be written, its descriptor leads to the null device."""

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError:
            _to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError:
            _to_nowhere()

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    def fileno(self) -> int:
        return sys.stdout.fileno()

    @property
    def encoding(self) -> str:
        return sys.stdout.encoding


def _to_nowhere() -> None:
    # What is still buffered goes there too: at exit the interpreter flushes, and would complain.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console() -> Console:
    """The console of the command line."""
    return Console(file=Enduring(), highlight=False)  # type: ignore[arg-type]  # as much of a stream as Rich uses
