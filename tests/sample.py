"""A probe for the tests of the harness: what it does is an axis."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

from harness.cells import Axes, Probe, Task
from harness.rows import Result


class SampleAxes(Axes, frozen=True, kw_only=True):
    do: Literal["nothing", "env", "sleep", "stale", "random", "caches"] = "nothing"
    n: int = 0
    s: float = 0.0


def run(axes: SampleAxes, task: Task) -> Result:
    if axes.do == "sleep":
        time.sleep(axes.s)
        return Result(facts={"visible": os.environ.get("CUDA_VISIBLE_DEVICES")})
    if axes.do == "env":
        return Result(facts={name: os.environ.get(name) for name in WATCHED})
    if axes.do == "random":
        import random

        return Result(facts={"random": random.random(), "pid": os.getpid(), "sid": os.getsid(0)})
    if axes.do == "caches":
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        seen = len(list(folder.glob("*"))) if folder.exists() else 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"kernel-{axes.n}").write_text("x")
        return Result(facts={"seen": seen})
    return Result(facts={"n": axes.n, "forked": "tests.sample" in sys.modules})


WATCHED = (
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TRITON_OVERRIDE_ARCH",
    "TORCH_LOGS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_DIR",
    "TMPDIR",
    "CUDA_HOME",
    "NCCL_DEBUG",
    "LD_LIBRARY_PATH",
)

PROBE = Probe(
    name="sample",
    question="Does the harness do what it says?",
    axes=SampleAxes,
    work="tests.sample:run",
    timed=False,
    preload=("tests.sample",),
    sources=("tests.sample",),
)
TABLE = {"sample": PROBE}
HEAD = 'schema = 1\ntitle = "t"\nprobe = "sample"\ndevice = "cpu"\n'


def prepare_slowly(folder: str) -> dict[str, float]:
    """As a preparation that runs a compiler for long."""
    import subprocess

    subprocess.run(["sleep", "60"], check=False)
    return {}
