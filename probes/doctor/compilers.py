"""What torch.compile builds with: Triton and its assembler on the GPU, a C++ compiler and headers beside it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from harness.hardware import Capability, Inventory
from probes.doctor import installed
from probes.doctor.report import Line, Mark

TITLE = "compilers"

# What Triton makes of sm_70, from offline compilation of small kernels; numerics were not run.
# First version of the row, mark, finding.
_TRITON_ON_VOLTA: tuple[tuple[tuple[int, int], Mark, str], ...] = (
    (
        (3, 4),
        "note",
        "tl.dot becomes scalar FMA, no tensor core: keep matrix products in cuBLAS and attention in CUTLASS "
        "(triton PR#5066); fused pointwise and reductions are fine, bf16 is emulated",
    ),
    (
        (3, 3),
        "problem",
        "fp16 tl.dot does not compile: 'Unsupported conversion from f16 to f16' (triton#6698)",
    ),
    ((3, 2), "problem", "a dot followed by a reduction aborts the process (triton#7263)"),
    ((0, 0), "note", "tensor cores by m8n8k4; bf16 does not assemble (pytorch#118122)"),
)


def lines(found: Inventory) -> list[Line]:
    """Triton for each capability here, then the tools."""
    capabilities = sorted({card.capability for card in found.cards if card.capability})
    # A display card beside cards that compute is the topic of no compiler.
    meant = [one for one in capabilities if one >= (7, 0)] or capabilities
    triton = [triton_on(one, installed.version("triton")) for one in meant]
    for_triton = [_ptxas(meant), _cc()] if installed.version("triton") else []
    return [*triton, _inductor(), *for_triton, _cxx(), _headers()]


def triton_on(capability: Capability, version: str | None) -> Line:
    """What this Triton makes of this capability."""
    what = "Triton on sm_{}{}".format(*capability)
    if version is None:
        return Line(what=what, value="no Triton", mark="problem", reason="torch.compile needs it on a GPU")
    if capability >= (8, 0):
        return Line(what=what, value=version)
    if capability < (7, 0):
        reason = "Inductor refuses cards below sm_70 (GPUTooOldForTriton)"
        return Line(what=what, value=version, mark="problem", reason=reason)
    if capability >= (7, 5):
        reason = "Triton supports sm_80 and up; what it makes of Turing was not measured"
        return Line(what=what, value=version, mark="note", reason=reason)
    numbers = installed.numbers(version)[:2]
    _, mark, reason = next(row for row in _TRITON_ON_VOLTA if numbers >= row[0])
    return Line(what=what, value=version, mark=mark, reason=reason)


def _inductor() -> Line:
    torch, reason = installed.torch_or_reason()
    if torch is None:
        return Line(what="Inductor", value="no torch", mark="problem", reason=reason)
    count, _ = installed.cuda_state()
    if count == 0:
        return Line(what="Inductor", value="C++ on the CPU")
    from torch._dynamo.device_interface import get_interface_for_device

    refused = [i for i in range(count) if not get_interface_for_device("cuda").is_triton_capable(f"cuda:{i}")]
    if refused:
        reason = (
            f"is_triton_capable is false for device {', '.join(map(str, refused))}: compile mode `none` only"
        )
        return Line(what="Inductor", value="refuses Triton", mark="problem", reason=reason)
    return Line(what="Inductor", value=f"Triton on {count} device{'s' * (count > 1)}")


def _ptxas(capabilities: list[Capability]) -> Line:
    named = os.environ.get("TRITON_PTXAS_PATH")
    path = Path(named) if named else _bundled_ptxas()
    if path is None:
        return Line(
            what="ptxas", value="none", mark="problem", reason="Triton's package should bring it: reinstall"
        )
    release = re.search(r"V([\d.]+)", _output([str(path), "--version"]))
    if release is None:
        return Line(what="ptxas", value=str(path), mark="problem", reason="it does not run")
    if min(capabilities, default=(9, 0)) < (7, 5) and installed.numbers(release[1])[:1] >= (13,):
        reason = "CUDA 13's assembler has no sm_70: name one of CUDA 12 in TRITON_PTXAS_PATH"
        return Line(what="ptxas", value=release[1], mark="problem", reason=reason)
    return Line(what="ptxas", value=release[1], reason="named by TRITON_PTXAS_PATH" if named else "")


def _bundled_ptxas() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin/ptxas"
    return path if path.exists() else None


def _cxx() -> Line:
    # Inductor looks for CXX, else for g++ alone (torch/_inductor/config.py: cpp.cxx).
    named = shlex.split(os.environ.get("CXX", ""))
    path = shutil.which(named[0] if named else "g++")
    if path is not None:
        return _compiler("C++ compiler", path, "named by CXX" if named else "")
    other = next((name for name in ("clang++", "c++") if shutil.which(name)), None)
    if other is not None and not named:
        reason = f"Inductor looks for g++ unless CXX names another: export CXX={other}"
    else:
        reason = "Inductor builds CPU kernels with it; `python3 -m harness.setup_check` names the package"
    return Line(
        what="C++ compiler", value=f"no {named[0] if named else 'g++'}", mark="problem", reason=reason
    )


def _cc() -> Line:
    # Triton looks for CC, else for gcc, else for clang (triton/runtime/build.py).
    named = shlex.split(os.environ.get("CC", ""))
    path = next((found for name in (named[:1] or ("gcc", "clang")) if (found := shutil.which(name))), None)
    if path is None:
        reason = "Triton builds its launchers with it: install gcc, or set CC"
        return Line(what="C compiler", value="none", mark="problem", reason=reason)
    return _compiler("C compiler", path, "named by CC" if named else "")


def _compiler(what: str, path: str, reason: str) -> Line:
    first = _output([path, "--version"]).splitlines() or [path]
    return Line(what=what, value=first[0][:80], reason=reason)


def _headers() -> Line:
    folder = Path(sysconfig.get_paths()["include"])
    if (folder / "Python.h").is_file():
        return Line(what="Python.h", value=str(folder))
    reason = "Triton and Inductor compile against it; `python3 -m harness.setup_check` names the package"
    return Line(what="Python.h", value="none", mark="problem", reason=reason)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
