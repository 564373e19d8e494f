"""Imports go one way. Reads the code; an arrow that design does not draw fails here."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("harness", "probes", "reports", "tc_volta", "cp_volta")
LEAVES = {"harness.cells", "harness.rows", "harness.stats", "harness.errors"}
# Who may import what of ours, by prefix of the importing module. The longest prefix decides.
MAY = {
    "tc_volta": {"tc_volta"},
    "cp_volta": {"cp_volta", "tc_volta"},
    "reports": {"reports", *LEAVES},
    # harness.child: what a cell writes; harness.hardware and harness.wheels: what set-up knows of cards;
    # harness.torchrun: the options of who starts a cell's ranks
    "probes": {
        "probes",
        "cp_volta",
        "tc_volta",
        *LEAVES,
        "harness.child",
        "harness.hardware",
        "harness.wheels",
        "harness.torchrun",
    },
    "harness.cells": set(),
    "harness.rows": set(),
    "harness.stats": set(),
    "harness.errors": set(),
    "harness.torchrun": {"harness.errors"},
    "harness": {"harness"},
    "harness.__main__": {"harness", "probes", "reports"},
    "harness.probe": {"harness", "probes", "reports"},
    "harness.verify": {"harness", "reports"},  # a command of its own
}
TORCH_FREE = ("harness", "reports")
HEAVY = {"torch", "transformers", "xformers"}


def _modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


def _imports(path: Path, name: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = name.split(".")[: -node.level] if path.stem != "__init__" else name.split(".")
                base = ".".join([*parent, base]).rstrip(".")
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def _allowed(name: str) -> set[str]:
    prefixes = [p for p in MAY if name == p or name.startswith(p + ".")]
    return MAY[max(prefixes, key=len)]


def _within(module: str, allowed: set[str]) -> bool:
    return any(module == a or module.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize(("name", "path"), _modules(), ids=[n for n, _ in _modules()])
def test_a_module_imports_only_what_the_design_allows(name: str, path: Path) -> None:
    ours = {m for m in _imports(path, name) if m.split(".")[0] in PACKAGES and _names_a_module(m)}
    wrong = {m for m in ours if not _within(m, _allowed(name)) and m != name}
    assert not wrong, f"{name} must not import {sorted(wrong)}"


def _names_a_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return len(name.split(".")) > 1 and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


@pytest.mark.parametrize("name", [n for n, _ in _modules() if n.split(".")[0] in TORCH_FREE])
def test_harness_and_reports_name_no_torch(name: str) -> None:
    path = dict(_modules())[name]
    assert not {m.split(".")[0] for m in _imports(path, name)} & HEAVY


_LIGHT = "harness.__main__, harness.session, harness.plan, probes.table, reports.load, reports.bench, reports.answers"


def test_planning_reading_and_reporting_never_import_torch() -> None:
    code = f"import sys, {_LIGHT}; from probes.table import table; table(); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not set(done.stdout.split()) & HEAVY


def test_importing_any_module_starts_no_process_and_initialises_no_device() -> None:
    names = [n for n, path in _modules() if not n.endswith("__main__") and _can_be_imported(path, n)]
    code = (
        "import importlib, os, subprocess, torch._inductor.compile_fx\n"
        "import matplotlib.font_manager\n"  # where there is no font cache yet, it asks fc-list
        "from transformers import PreTrainedModel\n"  # Inductor itself names its cache folder in the environment
        "subprocess.Popen.__init__ = lambda *a, **k: (_ for _ in ()).throw(AssertionError('a process'))\n"
        "before = dict(os.environ)\n"
        f"[importlib.import_module(n) for n in {names}]\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch._dynamo.config.suppress_errors\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def _can_be_imported(path: Path, name: str) -> bool:
    """Kernels in Triton are imported where there is one; torch for a CPU comes without."""
    return "triton" not in _imports(path, name) or importlib.util.find_spec("triton") is not None
