"""Check what the pages claim: run each claim's command where this machine can, else hold committed rows against it.

A claim that this machine cannot check keeps its last result. A command is run as it is written, in the repository's
root, with this Python; one that runs cells gets a folder of its own, and its rows are judged.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from harness import devices, fingerprint
from harness.errors import HarnessError
from harness.hardware import inventory
from harness.isolate import ROOT
from reports import bench, catalogue, claims, findings
from reports.claims import Check
from reports.findings import Finding

_TAIL_CHARS = 300
_CELLS = ("harness.probe", "harness")


def verify(wanted: list[str], console: Console, *, run: bool = True, root: Path = ROOT) -> int:
    """Check, keep what was found, render both pages. Returns the exit code: 1 where a claim fails."""
    held = claims.read(root / claims.FILE)
    ids = claims.only(held, wanted)
    known = findings.read(root / findings.FILE)
    failed = 0
    for _, words, check in held.checks() if run else ():
        if check.id not in ids:
            continue
        finding, why = checked(check, root)
        _tell(check, words, finding, why, console)
        failed += finding is not None and not finding.holds
        if finding is not None:
            known = msgspec.structs.replace(known, results={**known.results, check.id: finding})
            bench.write(root / findings.FILE, findings.encode(known))  # what is known survives an interrupt
    stale = set(known.results) - {check.id for _, _, check in held.checks()}
    known = msgspec.structs.replace(known, results={k: v for k, v in known.results.items() if k not in stale})
    if known.results:
        bench.write(root / findings.FILE, findings.encode(known))
    for name, text in catalogue.render(held, known, root).items():
        console.print(f"page: {bench.write(root / name, text.encode())}", markup=False, soft_wrap=True)
    return 1 if failed else 0


def checked(check: Check, root: Path) -> tuple[Finding | None, str]:
    """What was found, or None and why this machine cannot tell."""
    missing = [reason for need in check.needs if (reason := lacks(need))]
    if check.command and not missing:
        return _by_command(check, root), ""
    if check.run and (root / check.run / "run.json").is_file():
        return findings.in_rows(check, root / check.run), ""
    if not check.command and not check.run:
        return None, "rests on its sources"
    return None, "; ".join([*missing, *([f"no rows yet in {check.run}"] if check.run else [])])


def lacks(need: str) -> str:
    """Why this machine does not have it; empty where it does."""
    name, _, version = need.partition(" ")
    if name == "cuda":
        return "" if devices.here() == "cuda" else "needs a CUDA GPU"
    if name == "v100":
        return "" if any(card.capability == (7, 0) for card in inventory().cards) else "needs a V100"
    if name == "triton" and version:
        here = (ROOT / ".triton" / version / "triton").is_dir()
        return "" if here else f"needs Triton {version} in .triton/{version}"
    if name == "triton":
        return "" if importlib.util.find_spec("triton") else "needs Triton in this Python"
    if name == "g++":
        return "" if shutil.which(os.environ.get("CXX") or "g++") else "needs a C++ compiler"
    raise HarnessError(f"unknown need {need!r}")


def _by_command(check: Check, root: Path) -> Finding:
    words = [sys.executable, *shlex.split(check.command)[1:]]
    runs_cells = words[2] in _CELLS and bool(check.outcome)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ended, said = _ran([*words, *(["--out", str(out)] if runs_cells else [])], check.timeout_s, root)
        seconds = round(time.monotonic() - started, 1)
        if ended is None:
            return _finding(False, f"not done after {check.timeout_s:g} s", seconds)
        if runs_cells and (out / "run.json").is_file():
            # The rows of the command are all meant: `where` picks among those of a committed run.
            found = findings.in_rows(
                msgspec.structs.replace(check, where={}, value="", equals=None), out, "command"
            )
            return msgspec.structs.replace(found, seconds=seconds)
        if ended:
            return _finding(False, f"exit {ended}: {said[-_TAIL_CHARS:].strip()}", seconds)
        if words[2] == "pytest" and " passed" not in (summary := _summary(said)):
            return _finding(False, f"no test ran: {summary or 'no summary'}", seconds)
        return _finding(True, _summary(said) or "exit 0", seconds)


def _ran(words: list[str], timeout_s: float, root: Path) -> tuple[int | None, str]:
    """(exit code, or None past the deadline; what it printed)."""
    try:
        done = subprocess.run(
            words, cwd=root, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def _summary(said: str) -> str:
    """pytest's own last line, without its seconds."""
    lines = [line for line in said.splitlines() if " passed" in line or " skipped" in line]
    return lines[-1].strip("= ").partition(" in ")[0] if lines else ""


def _finding(holds: bool, detail: str, seconds: float) -> Finding:
    return Finding(
        holds=holds,
        how="command",
        detail=detail,
        at=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        device=", ".join(_device_names()),
        versions=findings.versions(fingerprint.stack()),
        seconds=seconds,
    )


def _device_names() -> Iterator[str]:
    here = devices.here()
    described = fingerprint.cuda_devices() if here == "cuda" else fingerprint.cpu()
    names = described.get("names") or [described.get("name") or here]
    yield from dict.fromkeys(map(str, names))


def _tell(check: Check, words: str, finding: Finding | None, why: str, console: Console) -> None:
    if finding is None:
        word, style, text = "cannot be checked here", "yellow", why
    else:
        word, style = ("holds", "green") if finding.holds else ("FAILS", "bold red")
        text = finding.detail + ("" if finding.how == "command" else f" (rows of {check.run})")
    console.print(f"{word}: {check.id}: {text}", style=style, markup=False, soft_wrap=True)
    if finding is not None and not finding.holds:
        console.print(f"    claimed: {words}", markup=False, soft_wrap=True)
