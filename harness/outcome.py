"""What became of a cell: its exit, its result file and its log, read as one `Result`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from harness.cells import Task
from harness.rows import Result, RowError, decode_result

LARGEST_RESULT_BYTES = 16 << 20
_LARGEST_LOG_BYTES = 32 << 20  # while the cell runs
KEPT_LOG_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def judge(task: Task, exit: str, *, timed_out: bool, oom_kills: int) -> Result:
    """The one result of a cell that has ended.

    exit: "exit N" or a signal's name. timed_out: the harness ended it at its deadline.
    oom_kills: how many processes the kernel's out-of-memory killer took while the cell ran.
    """
    if timed_out:
        return Result(status="timeout", reason=f"deadline of {task.measure.timeout_s:g} s; ended by {exit}")
    result = _read(Path(task.result_path))
    if exit == "exit 0":
        return result or Result(status="crashed", reason="exit 0 without a result")
    if exit == "SIGKILL" and oom_kills:
        return Result(status="oom", reason="SIGKILL by the kernel's out-of-memory killer (host memory)")
    when = "before a result" if result is None else "after its result was written"
    hint = "; not sent by the harness" if exit == "SIGKILL" else ""
    crashed = {"status": "crashed", "reason": f"{exit} {when}{hint}"}
    return msgspec.structs.replace(result or Result(), **crashed)


def _read(path: Path) -> Result | None:
    try:
        size = path.stat().st_size
        if size > LARGEST_RESULT_BYTES:
            limit = f"{LARGEST_RESULT_BYTES >> 20} MiB"
            return Result(status="error", reason=f"a result of {size:,} bytes; the largest kept is {limit}")
        return decode_result(path.read_bytes())
    except FileNotFoundError:
        return None
    except (RowError, OSError, RecursionError) as error:
        return Result(status="error", reason=f"the result is not readable: {error}")


def log_tail(path: Path, lines: int = 20) -> tuple[str, ...]:
    """The last lines of a cell's output, printable, 400 characters each at most."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    kept = [_CONTROL.sub("", line.rsplit("\r", 1)[-1]).rstrip() for line in text.split("\n")]
    return tuple(line[:400] for line in kept if line)[-lines:]


def cap_log(path: Path, most_bytes: int = _LARGEST_LOG_BYTES) -> None:
    """Keep the tail of a log that a cell fills without end. The cell appends, so it goes on at the end."""
    try:
        if path.stat().st_size <= most_bytes:
            return
        with path.open("r+b") as file:
            file.seek(-_TAIL_BYTES, 2)
            tail = file.read(_TAIL_BYTES)
            file.seek(0)
            file.write(b"[earlier output dropped]\n" + tail)
            file.truncate()
    except OSError:
        pass  # gone, or the disk is full: the row does not depend on it


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where it does not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) if match else 0
