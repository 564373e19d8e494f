"""What a figure depends on besides its cell: stack, device, host, code. Imports no torch.

Resume needs stack, device and code to match; a comparison chooses which parts may differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from harness import environ
from harness.cells import Device, Probe
from harness.isolate import ROOT

RESUME_PARTS = ("stack", "device", "code")
# Of every cell, whatever its probe: how it is started, seeded, and written.
_HARNESS = ("harness.cells", "harness.child", "harness.environ", "harness.rows", "harness.server")
_SELECTION = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_LIBRARIES = (
    *("torch", "triton", "transformers", "xformers", "numpy", "bitsandbytes", "peft", "liger-kernel"),
    *("nvidia-cuda-runtime", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
    *("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"),
)


def environment(device: Device, probe: Probe) -> dict[str, dict[str, Any]]:
    """The four parts, in full, as run.json keeps them."""
    return {
        "stack": stack(),
        "device": cuda_devices() if device == "cuda" else cpu(),
        "host": host(),
        "code": code(probe),
    }


def digests(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A short hash of each part, as a row keeps them. What does not change a figure is left out."""
    hashed = {
        name: hashlib.sha256(msgspec.json.encode(_what_counts(name, part), order="sorted")).hexdigest()[:12]
        for name, part in parts.items()
        if name != "code"
    }
    return {**hashed, "code": str(parts["code"]["hash"])}


def _what_counts(name: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which of eight equal GPUs was used, and how many there are, changes no figure of a cell."""
    if name == "stack":
        env = {k: v for k, v in part.get("env", {}).items() if k not in _SELECTION}
        return {**part, "env": env}
    if name == "device":
        return {k: sorted({str(x) for x in v}) if isinstance(v, list) else v for k, v in part.items()}
    return part


def stack() -> dict[str, Any]:
    """Versions of what computes, from the installed packages' metadata."""
    found = {name: _version(name) for name in _LIBRARIES}
    versions: dict[str, Any] = {name: version for name, version in found.items() if version}
    return {"python": platform.python_version(), **versions, "env": environ.recorded(os.environ)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu() -> dict[str, Any]:
    """The CPU as a device."""
    return {
        "name": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "usable": len(os.sched_getaffinity(0)),
    }


def cuda_devices() -> dict[str, Any]:
    """The GPUs as NVML sees them; {} without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "names": [_text(pynvml.nvmlDeviceGetName(h)) for h in handles],
            "power_limit_w": [_maybe(pynvml.nvmlDeviceGetEnforcedPowerLimit, h, 1000) for h in handles],
            "max_sm_clock_mhz": [
                _maybe(pynvml.nvmlDeviceGetMaxClockInfo, h, 1, pynvml.NVML_CLOCK_SM) for h in handles
            ],
            "memory_bytes": [int(pynvml.nvmlDeviceGetMemoryInfo(h).total) for h in handles],
        }
    finally:
        pynvml.nvmlShutdown()


def host() -> dict[str, Any]:
    """The machine around the device."""
    return {
        "hostname": platform.node(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def code(probe: Probe) -> dict[str, Any]:
    """Hash of the files that the probe's cells use, and the repository's revision."""
    digest = hashlib.sha256()
    for name in sorted({*_HARNESS, *(probe.sources or (probe.work.split(":")[0].split(".")[0],))}):
        for path in _files(name):
            digest.update(f"{name}:{path.name}".encode() + path.read_bytes())
    revision = _git("rev-parse", "HEAD")
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no")) if revision else None
    return {"hash": digest.hexdigest()[:12], "git": revision or "unknown", "dirty": dirty}


def _files(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin else []


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _maybe(query: Any, handle: Any, divisor: int, *arguments: Any) -> float | None:
    """The reading, or None where this GPU has no such sensor."""
    import pynvml

    try:
        return float(query(handle, *arguments)) / divisor
    except pynvml.NVMLError:
        return None
