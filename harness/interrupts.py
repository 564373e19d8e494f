"""SIGINT, SIGTERM and SIGHUP are counted, not obeyed: whoever holds the rows decides when to stop."""

from __future__ import annotations

import signal
import types

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context manager; `asked` says whether the user wants to stop.

    A second signal changes nothing: stopping takes seconds, and rows and run.json are to end whole.
    A signal that the caller ignores (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.asked = True
