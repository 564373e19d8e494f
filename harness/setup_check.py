"""Can this machine install and run the project? Asked before anything is installed; standard library only.

`python3 -m harness.setup_check` prints one message that names everything that is missing, with the package
that brings it, and exits with 2; or prints nothing and exits with 0.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

LEAST_PYTHON = (3, 10)
COMPILERS = ("c++", "g++", "clang++")


class Missing(NamedTuple):
    """One thing that is not here, why it is needed, and where it comes from.

    A tuple and no dataclass, since this module has to start under the Python that it refuses.
    """

    what: str
    why: str
    debian: str
    fedora: str
    conda: str


def missing(
    *,
    version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor),
    include: Path | None = None,
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    which: Callable[[str], str | None] = shutil.which,
    environ: Mapping[str, str] = os.environ,
) -> list[Missing]:
    """Everything that is missing, worst first. The parameters let a test describe another machine."""
    checks = (
        _python(version),
        _pip(version, has_module),
        _headers(version, include or Path(sysconfig.get_paths()["include"])),
        _compiler(which, environ),
    )
    return [found for found in checks if found is not None]


def _python(version: tuple[int, int]) -> Missing | None:
    if version >= LEAST_PYTHON:
        return None
    return Missing(
        what=f"Python {'.'.join(map(str, LEAST_PYTHON))} or newer (this one is {version[0]}.{version[1]})",
        why="give another one with PYTHON=python3.12 make setup",
        debian="apt install python3 python3-venv python3-dev",
        fedora="dnf install python3.12 python3.12-devel",
        conda="conda install 'python>=3.10'",
    )


def _pip(version: tuple[int, int], has_module: Callable[[str], bool]) -> Missing | None:
    # Debian splits ensurepip off into python3-venv: `import venv` works and `python -m venv` then fails.
    absent = [name for name in ("venv", "ensurepip") if not has_module(name)]
    if not absent:
        return None
    return Missing(
        what=f"the module{'s' * (len(absent) > 1)} {' and '.join(absent)}",
        why="they make the virtual environment",
        debian=f"apt install python{version[0]}.{version[1]}-venv",
        fedora="dnf install python3-pip",
        conda="conda install pip",
    )


def _headers(version: tuple[int, int], include: Path) -> Missing | None:
    if (include / "Python.h").is_file():
        return None
    return Missing(
        what=f"Python.h (not in {include})",
        why="Triton and Inductor compile launchers against it",
        debian=f"apt install python{version[0]}.{version[1]}-dev",
        fedora="dnf install python3-devel",
        conda="conda install python (its package has the headers)",
    )


def _compiler(which: Callable[[str], str | None], environ: Mapping[str, str]) -> Missing | None:
    named = environ.get("CXX", "")
    words = shlex.split(named)
    if words and which(words[0]):
        return None
    if not words and any(which(name) for name in COMPILERS):
        return None
    what = (
        f"the C++ compiler that CXX names ({named})" if words else f"a C++ compiler ({', '.join(COMPILERS)})"
    )
    return Missing(
        what=what,
        why="torch.compile builds its CPU kernels and launchers with it",
        debian="apt install g++",
        fedora="dnf install gcc-c++",
        conda="conda install -c conda-forge cxx-compiler",
    )


def message(found: list[Missing]) -> str:
    """One text for all of it."""
    lines = [f"This machine lacks {len(found)} thing{'s' * (len(found) > 1)} that the project needs:"]
    for one in found:
        lines += [
            f"  {one.what}: {one.why}",
            f"    Debian, Ubuntu: {one.debian}",
            f"    Fedora:         {one.fedora}",
            f"    conda:          {one.conda}",
        ]
    return "\n".join(lines)


def main() -> int:
    """0 if nothing is missing; else 2, as for any input that a user can mend."""
    found = missing()
    if found:
        print(message(found), file=sys.stderr)
    return 2 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
