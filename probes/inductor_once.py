"""What of a cold Inductor cell on a CPU is not the cell's own work, done once for a whole run.

Two things: the precompiled header (about 150 MB, in the *temporary* folder that was set when torch was imported,
whatever TORCHINDUCTOR_CACHE_DIR says), and the probing of instruction sets, which compiles and loads a test for
each. The fork server does both after its imports; its forks inherit the answers in memory, and find the header
where the server's TMPDIR points: inside the run's own folder. No cell's kernels reach another.

Torch's private compiler classes are named here and nowhere else. Where a torch has other ones, this raises, the
server says so, and cells do the work themselves.
"""

from __future__ import annotations

import time
from pathlib import Path

# As Inductor writes kernels: the same header and flags, so that the header it is compiled with is theirs.
_TRIVIAL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 0.0f; }
"""


def prepare(folder: str) -> dict[str, float]:
    """Probe instruction sets and precompile the header below `folder`; then make it read-only.

    Runs compilers in subprocesses, no tensor operation. Returns seconds by part.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    began = time.monotonic()
    valid_vec_isa_list()
    probed = time.monotonic()
    CppPythonBindingsCodeCache.load_pybinding(["float*"], _TRIVIAL)
    built = time.monotonic()
    for path in Path(folder).rglob("*"):
        if path.is_file() and not path.name.endswith(".lock"):
            path.chmod(0o444)
    return {"instruction sets": probed - began, "precompiled header": built - probed}
