"""What the runner and a server say to each other: one JSON object per line over a socket pair. A leaf."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from harness.cells import Task


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag=lambda name: name.lower()):
    pass


class Start(_Message, frozen=True, kw_only=True):
    """Runner: run this cell, as a fork of the server or in a cold process."""

    task: Task
    cold: bool = False


class Kill(_Message, frozen=True, kw_only=True):
    """Runner: send the signal to the cell's whole process group, if the cell still runs."""

    id: str
    signal: int


class Ready(_Message, frozen=True, kw_only=True):
    """Server: preloaded. `poisoned` says why a fork of this server could not be fresh, or is empty."""

    pid: int
    preloaded: tuple[str, ...] = ()
    failed: dict[str, str] = {}  # module -> error
    prepared: dict[str, float] = {}  # part -> seconds, or a note -> 0
    poisoned: str = ""
    seconds: float = 0.0


class Started(_Message, frozen=True, kw_only=True):
    id: str
    pid: int


class Ended(_Message, frozen=True, kw_only=True):
    """Server: the cell is reaped, and no process of it is left."""

    id: str
    exit: str  # "exit 0", "exit 3", "SIGSEGV"
    cpu_s: float
    max_rss_bytes: int
    killed_strays: int


Request = Start | Kill
Event = Ready | Started | Ended


class Line:
    """Messages over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self._requests = msgspec.json.Decoder(Request)
        self._events = msgspec.json.Decoder(Event)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Request | Event) -> None:
        """Raises OSError when the other end is gone."""
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def requests(self) -> Iterator[Request]:
        """What has arrived. Raises EOFError when the other end is gone."""
        return (self._requests.decode(line) for line in self._lines())

    def events(self) -> Iterator[Event]:
        """What has arrived. Raises EOFError when the other end is gone."""
        return (self._events.decode(line) for line in self._lines())

    def close(self) -> None:
        self._sock.close()

    def _lines(self) -> list[bytes]:
        try:
            data = self._sock.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines
