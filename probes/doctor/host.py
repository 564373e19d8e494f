"""The machine around the card: cores, memory and its limits, shared memory, locked memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from probes.doctor.report import Line

TITLE = "host"
_GIB = 1 << 30
_LEAST_SHM_BYTES = 1 * _GIB
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def lines(cgroup: Path = Path("/sys/fs/cgroup"), shm: Path = Path("/dev/shm")) -> list[Line]:
    """What a run on this host can count on."""
    return [_cores(cgroup), _memory(cgroup), _shared_memory(shm), _locked_memory()]


def gib(size_bytes: float) -> str:
    """`23.4 GiB`."""
    return f"{size_bytes / _GIB:.1f} GiB"


def _cores(cgroup: Path) -> Line:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    if quota is not None and quota < usable:
        reason = f"the cgroup's quota; {usable} cores are visible, so set OMP_NUM_THREADS"
        return Line(what="cores", value=f"{quota:g}", mark="note", reason=reason)
    if usable < present:
        return Line(what="cores", value=f"{usable} of {present}", reason="this process's CPU affinity")
    return Line(what="cores", value=str(usable))


def _cpu_quota(cgroup: Path) -> float | None:
    words = _read(cgroup / "cpu.max").split()  # v2: "200000 100000" or "max 100000"
    if len(words) != 2:
        words = [_read(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]  # v1; -1: none
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory(cgroup: Path) -> Line:
    memory = psutil.virtual_memory()
    limit, used = memory_limit_bytes(cgroup)
    if limit is None or limit >= memory.total:
        return Line(what="memory", value=f"{gib(memory.available)} free of {gib(memory.total)}")
    free = "" if used is None else f"{gib(max(0, min(limit - used, memory.available)))} free of "
    reason = f"the cgroup's limit; the host has {gib(memory.total)}. Offloaded checkpoints count against it"
    return Line(what="memory", value=f"{free}{gib(limit)}", mark="note", reason=reason)


def memory_limit_bytes(cgroup: Path) -> tuple[int | None, int | None]:
    """(limit, used) of this process's memory cgroup, v2 or v1; None where there is none."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(cgroup / limit_file), _read(cgroup / used_file)
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            return int(limit), int(used) if used.isdigit() else None
    return None, None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _shared_memory(shm: Path) -> Line:
    try:
        size = shutil.disk_usage(shm)
    except OSError as error:
        reason = f"{error.strerror}; NCCL and data loaders between processes need it"
        return Line(what="shared memory", value=f"no {shm}", mark="note", reason=reason)
    value = f"{gib(size.free)} free of {gib(size.total)}"
    if size.total < _LEAST_SHM_BYTES:
        reason = "little: NCCL between GPUs without peer access, and gloo, use it (containers: --shm-size=1g)"
        return Line(what="shared memory", value=value, mark="note", reason=reason)
    return Line(what="shared memory", value=value)


def _locked_memory() -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Line(what="locked memory", value="unlimited (ulimit -l)")
    reason = (
        "bounds mlock and InfiniBand registration (NCCL across hosts: ulimit -l unlimited); "
        "CUDA's pinned memory is bounded by the host's memory instead"
    )
    return Line(what="locked memory", value=f"{soft / (1 << 20):g} MiB (ulimit -l)", reason=reason)
