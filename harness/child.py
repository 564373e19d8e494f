"""Inside a cell's process: seed, call the probe's function, write its result.

python -m harness.child TASK.json     (a cold cell; a fork calls `main` directly)
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness import server
from harness.cells import Axes, Task
from harness.rows import Result, encode

STALE = 75  # the fork found itself not fresh: the harness runs the cell in a cold process instead


def main(task: Task) -> int:
    """Run the cell and write its result. Returns the process's exit code."""
    tempfile.tempdir = None  # cached by whoever asked first; TMPDIR is this cell's own
    if task.check_fresh and (why := server.poisoned()):
        print(f"not fresh: {why}", flush=True)
        return STALE
    result = execute(task)
    try:
        write(result, Path(task.result_path))
    except OSError as error:
        print(f"the result could not be written: {error}", file=sys.stderr)
        return 74
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def execute(task: Task) -> Result:
    """What the probe's function found. Its exceptions become a result with status error or oom."""
    try:
        function, axes_type = resolve(task.work)
        seed(task.seed)
        result: object = function(msgspec.convert(task.axes, axes_type), task)
        if not isinstance(result, Result):
            return Result(
                status="error", reason=f"{task.work} returned a {type(result).__name__}, not a Result"
            )
        encode(result)  # here, where a fact that is no JSON can still become the row's reason
        return result
    except SystemExit as leave:  # sys.exit() inside a probe would end the cell without a word
        traceback.print_exc()
        return Result(status="error", reason=f"{task.work} called sys.exit({leave.code!r})")
    except Exception as error:  # a cell's fault is its row's reason, never the harness's end
        traceback.print_exc()
        return Result(status="oom" if _is_oom(error) else "error", reason=_words(error))


def resolve(work: str) -> tuple[Callable[[Axes, Task], Result], type[Axes]]:
    """The function that "package.module:function" names, and the type of its first parameter."""
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(function)
    return function, next(iter(hints.values()))


def seed(value: int) -> None:
    """Python's random numbers, and torch's if the cell has imported it. Forks share the server's state."""
    random.seed(value)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(value)


def write(result: Result, path: Path) -> None:
    """Whole or not at all: a temporary name, then a rename."""
    data = encode(result)
    partial = path.with_suffix(".part")
    partial.write_bytes(data)
    partial.rename(path)


def _is_oom(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return "DefaultCPUAllocator: can't allocate memory" in text or "CUDA out of memory" in text


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:2000]


if __name__ == "__main__":
    # A cold process exits without the interpreter's teardown, as a fork does.
    os._exit(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)))
