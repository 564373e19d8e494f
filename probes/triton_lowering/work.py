"""One kernel for one target: a process compiles it, then its text and the assembler's words become a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from harness.cells import Task
from harness.rows import Result, Verdict
from probes.triton_lowering import LoweringAxes, assembly, sources

_ROOT = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("lower.py")
_LOG_LINES = 40


def run(axes: LoweringAxes, task: Task) -> Result:
    """Compile and look. A compiler that dies is `crashed`; one that refuses is `error`, in its own words."""
    where, missing = triton_folder(axes.triton)
    if missing:
        return Result(status="unsupported", reason=missing)
    folder = Path(task.folder)
    spec = folder / "spec.json"
    spec.write_bytes(msgspec.json.encode(_spec(axes)))
    ended, log = _compile(spec, folder, where)
    facts: dict[str, Any] = {"log_lines": log.count("\n")}
    if ended < 0:
        name = signal.Signals(-ended).name
        said = assembly.complaint("", log)
        return Result(
            status="crashed", reason=f"the compiler died of {name}: {said}".rstrip(": "), facts=facts
        )
    try:
        done = json.loads((folder / "done.json").read_text())
    except FileNotFoundError:
        reason = f"the compiler ended with exit {ended} and no result: {assembly.complaint('', log)}"
        return Result(status="crashed", reason=reason.rstrip(": "), facts=facts)
    facts = {"triton": done["triton"]}
    if "error" in done:
        return Result(status="error", reason=assembly.complaint(done["error"], log), facts=facts)
    return _looked(axes, folder, done)


def triton_folder(version: str) -> tuple[str, str]:
    """(folder to put on the path, "" for none needed; why there is no such Triton, or "")."""
    if version != "installed":
        folder = _ROOT / ".triton" / version
        if (folder / "triton").is_dir():
            return str(folder), ""
        install = f"python -m pip install --no-deps --target .triton/{version} triton=={version}"
        return "", f"no Triton {version} in .triton/{version}: {install}"
    asked = [sys.executable, "-c", "import triton"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "", ""
    last = (done.stderr.strip().splitlines() or ["no words"])[-1]
    install = "python -m pip install --no-deps --target .triton/3.7.1 triton==3.7.1, then triton=3.7.1"
    return "", f"Triton does not import in this Python ({last}); it needs no GPU: {install}"


def _spec(axes: LoweringAxes) -> dict[str, object]:
    kernel = sources.find(axes.kernel)
    given = sources.arguments(kernel, axes.dtype, axes.size) if kernel.signature else []
    options = {**kernel.options, **({"num_warps": axes.num_warps} if axes.num_warps else {})}
    return {
        "file": str(kernel.file.resolve()),
        "kernel": kernel.name,
        "arguments": given,
        "target": int(axes.target.removeprefix("sm_")),
        "options": options,
    }


def _compile(spec: Path, folder: Path, where: str) -> tuple[int, str]:
    """(exit code, negative for a signal; what the compiler said). The cell's log gets the end of it."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    if where:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [where, env.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(_WORKER), str(spec), str(folder)],
        capture_output=True,
        text=True,
        errors="replace",
        env=env,
        check=False,
    )
    log = done.stderr.replace(f"{folder}/", "").replace(f"{_ROOT}/", "").replace(f"{sys.base_prefix}/", "")
    said = [line for line in log.splitlines() if line.strip()]
    # Refusals are followed by pages of IR; the words before it are what a reader needs, and the exception after it.
    kept = said if len(said) <= _LOG_LINES else [*said[:8], "[…]", *said[8 - _LOG_LINES :]]
    print("\n".join(kept), file=sys.stderr, flush=True)
    return done.returncode, log


def _looked(axes: LoweringAxes, folder: Path, done: dict[str, Any]) -> Result:
    target = int(axes.target.removeprefix("sm_"))
    ptx = (folder / "kernel.ptx").read_text()
    kernel = assembly.made((folder / "kernel.ttir").read_text(), ptx)
    version, used = _assembled(folder / "kernel.ptx", target, Path(done["tools"]))
    limit = assembly.SHARED_LIMIT_BYTES[target]
    facts: dict[str, Any] = {
        "triton": done["triton"],
        "ptxas": version,
        "dots": assembly.dots_in_words(kernel),
        "matrix_instructions": sum(kernel.matrix.values()),
        "fma": kernel.fma,
        "bf16_instructions": kernel.bf16,
        "ptx_lines": kernel.lines,
        "registers": used.registers,
        "spill_store_bytes": used.spill_store_bytes,
        "spill_load_bytes": used.spill_load_bytes,
        "shared_bytes": done["shared"],
        "shared_limit_bytes": limit,
        "cubin_bytes": (folder / "kernel.cubin").stat().st_size,
        "num_warps": done["warps"],
    }
    if done["shared"] > limit:
        reason = f"needs {done['shared']:,} bytes of shared memory; a block of {axes.target} has {limit:,}"
        return Result(status="unsupported", reason=reason, facts=facts)
    verdict, words = judged(kernel, used, target)
    return Result(verdict=verdict, verdict_reason=words, facts=facts)


def judged(kernel: assembly.Made, used: assembly.Resources, target: int) -> tuple[Verdict, str]:
    """Caveat: a scalar dot that the card has an instruction for, or spilled registers."""
    could = [kind for kind in kernel.operands if kind in assembly.MATRIX_TYPES[target]]
    scalar = bool(kernel.dots) and not kernel.matrix
    spilled = (used.spill_store_bytes or 0) + (used.spill_load_bytes or 0)
    words = [assembly.dots_in_words(kernel)]
    if scalar and not could:
        words[0] += f" (sm_{target} has none for {', '.join(kernel.operands) or 'this type'})"
    if spilled:
        words.append(f"{used.spill_store_bytes:,} bytes of registers spilled per thread")
    if used.registers is None:
        words.append("the assembler did not say how many registers")
    return "caveat" if spilled or (scalar and could) or used.registers is None else "ok", "; ".join(words)


def _assembled(ptx: Path, target: int, tools: Path) -> tuple[str, assembly.Resources]:
    """(the assembler's version, what it says it used). It runs once more: Triton keeps no log of it."""
    tool = os.environ.get("TRITON_PTXAS_PATH") or str(tools / "ptxas")
    arch = f"sm_{target}a" if target >= 90 else f"sm_{target}"
    asked = [tool, "-v", f"--gpu-name={arch}", str(ptx), "-o", os.devnull]
    log = subprocess.run(asked, capture_output=True, text=True, check=False)
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    release = version.rsplit(" V", 1)[-1].split()[0] if " V" in version else "unknown"
    return release, assembly.resources(log.stderr + log.stdout)
