"""What of a cold Inductor cell on a CPU is not the cell's own work, done once for a whole run.

Two things are the same for every cell of a run:

    probing instruction sets   compiles and loads a test for each (six calls of the compiler on an AVX-512 machine)
    the precompiled header     150 MB, in `precompiled_headers` of the *temporary* folder that was set when torch was
                               imported, whatever TORCHINDUCTOR_CACHE_DIR says later

The fork server does both after its imports, in subprocesses, with TMPDIR and TORCHINDUCTOR_CACHE_DIR inside the run's
folder. Its forks inherit the answers in memory (`functools.cache`) and the header's path with them, so they neither
look nor lock. What they compile goes to the TORCHINDUCTOR_CACHE_DIR that each sets for itself, which is read late: no
cell's kernels reach another. The header's files are made read-only; folders are not, since a cell that compiles with
other flags than the default needs a header of its own, and would fail where it cannot write one.

Torch's private names are used here and nowhere else. Where a torch lacks one, or nothing can be compiled, the answer
says so and each cell does the work itself: slower, and no less right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

# As Inductor writes kernels: compiled by the same class with the same flags, so with the very header of theirs.
_TRIVIAL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 0.0f; }
"""


class _Outside(Exception):
    """The header would not lie in the run's folder."""


def prepare(folder: str) -> dict[str, float]:
    """Probe instruction sets and precompile the header below `folder`, then make its files read-only.

    Returns seconds by part; a part that could not be done is a note with its reason, at 0 seconds. Never raises:
    the cells of the run work without it. Runs compilers in subprocesses, and no tensor operation.
    """
    done: dict[str, float] = {}
    for part, work in (("instruction sets", _probe), ("precompiled header", _precompile)):
        began = time.monotonic()
        try:
            work(Path(folder))
        except Exception as error:  # private parts of torch raise whatever they like
            reason = str(error).strip().splitlines() or [""]
            done[f"{part} left to each cell: {type(error).__name__}: {reason[0][:200]}"] = 0.0
        else:
            done[part] = time.monotonic() - began
    _protect(Path(folder))
    return done


def _probe(folder: Path) -> None:
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()


def _precompile(folder: Path) -> None:
    from torch._inductor import codecache

    place = Path(codecache._HEADER_DIR)
    if folder.resolve() not in place.resolve().parents:
        raise _Outside(f"this process keeps it in {place}")
    cache = codecache.CppPythonBindingsCodeCache
    compile_later: Callable[[], object] = cache.load_pybinding_async(["float*"], _TRIVIAL)
    del compile_later  # the header is there once the kernel could be compiled; the kernel is not wanted
    cache.cache_clear()
    if not any(place.glob("*.[gp]ch")):
        raise FileNotFoundError(f"no precompiled header in {place}")


def _protect(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".lock":  # a lock is opened for writing by whoever asks
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o444 if path.suffix != ".so" else 0o555)
