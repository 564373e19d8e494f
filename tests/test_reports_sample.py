"""Rows as real runs leave them, for the tests of reports: built by hand, no device needed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.rows import (
    AttentionReport,
    CompileReport,
    DeviceState,
    GraphBreak,
    Isolation,
    Memory,
    Parity,
    Row,
    TensorError,
    decode,
    encode,
)
from reports.load import Run

GIB = 2**30
ENVIRONMENT = {
    "stack": {"python": "3.12.3", "torch": "2.10.0", "triton": "3.6.0", "xformers": "0.0.35", "env": {}},
    "device": {
        "driver": "580.65.06",
        "names": ["Tesla V100-SXM2-32GB"],
        "power_limit_w": [300.0],
        "memory_bytes": [32 * GIB],
    },
    "host": {
        "hostname": "node7",
        "cpu": "Xeon Gold 6148",
        "cores": 40,
        "memory_bytes": 384 * GIB,
        "kernel": "6.8",
    },
    "code": {"hash": "0a1b2c3d4e5f", "git": "f" * 40, "dirty": False},
}
AXES = {
    "model": "qwen2.5-1.5b",
    "attention": "math",
    "compile": "none",
    "dtype": "fp16",
    "seq": 1024,
    "batch": 1,
    "checkpointing": "full",
    "step": "fwd+bwd",
}
RIGHT = Parity(
    verdict="ok", reason="every gradient within twice eager's error", reference="float64, eager", tensors=338
)
WRONG = Parity(
    verdict="mismatch",
    reason="3 of 338 gradients off, first: layers.0.q_proj.weight",
    tensors=338,
    worst=(
        TensorError(name="layers.0.q_proj.weight", error=1.4, eager_error=0.002, cosine=0.01, outliers=812),
    ),
)
TOML = """
schema = 1
[axes]
attention = ["math", "efficient", "xformers", "flash", "cudnn"]
compile = ["none", "mlp", "layers", "model"]
seq = [1024, 2048, 4096, 8192]
"""


def row(*, tok_s: float = 3000.0, peak_gib: float = 9.0, steps: int = 8, **changes: Any) -> Row:
    """A good row; axes may be given by name. Step times alternate by ±0.5 %."""
    axes = {
        **AXES,
        **{key: changes.pop(key) for key in list(changes) if key in AXES},
        **changes.pop("more", {}),
    }
    seq = int(axes.get("seq", 1024))
    step_s = seq / tok_s
    fields: dict[str, Any] = {
        "suite": "single.cuda",
        "probe": "train-step",
        "cell": hashlib.sha256(json.dumps(axes).encode()).hexdigest()[:16],
        "device": "cuda",
        "axes": axes,
        "measure": {"warmup_steps": 3, "steps": steps, "cache": "cold"},
        "environment": "e1",
        "tokens_per_step": seq,
        "first_step_s": 2.5 if axes["compile"] == "none" else 41.0,
        "step_s": tuple(step_s * (1.005 if i % 2 else 0.995) for i in range(steps)),
        "memory": Memory(
            allocated_peak_bytes=int(peak_gib * GIB), reserved_peak_bytes=int((peak_gib + 1) * GIB)
        ),
        "parity": RIGHT,
        "attention": _attention(str(axes["attention"])),
        "compile": CompileReport(
            asked=str(axes["compile"]), graphs=1, phases_s={"dynamo": 3.2, "inductor": 30.1}
        ),
        "isolation": Isolation(method="forkserver", pid=4711, exit="exit 0"),
    }
    renamed = {"compiled": "compile", "kernel": "attention"}  # fields that are called like an axis
    changes = {renamed.get(name, name): value for name, value in changes.items()}
    return Row(**{**fields, **changes})


def _attention(asked: str) -> AttentionReport:
    return AttentionReport(asked=asked, ran=asked, honoured=True, source="profiler: CUDA kernels")


def failed(status: str, reason: str, expected: bool = False, **changes: Any) -> Row:
    """A row without results."""
    empty = {
        "tokens_per_step": None,
        "step_s": (),
        "first_step_s": None,
        "memory": Memory(),
        "parity": None,
        "kernel": None,
        "compiled": None,
    }
    return row(**{**empty, "status": status, "reason": reason, "expected": expected, **changes})


def run(*rows: Row, **meta: Any) -> Run:
    """A finished run of these rows."""
    base = {
        "schema": 1,
        "suite": "single.cuda",
        "title": "one device: attention x compile",
        "command": ["python", "-m", "harness", "run", "single"],
        "started_at": "2026-01-02T03:04:05+00:00",
        "finished_at": "2026-01-02T04:04:05+00:00",
        "interrupted": False,
        "cells": len(rows),
        "suite_toml": TOML,
        "environments": {"e1": ENVIRONMENT},
    }
    meta = {**base, **meta}
    return Run(name=meta["suite"], title=meta["title"], meta=meta, rows=tuple(rows))


def write(folder: Path, a_run: Run) -> Path:
    """The run as a folder."""
    (folder / "rows").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(a_run.meta))
    for one in a_run.rows:
        (folder / "rows" / f"{one.cell}.r{one.replicate}.json").write_bytes(encode(one))
    return folder


_BASE = {"math": 3350.0, "efficient": 3600.0, "xformers": 3741.0, "flash": 4400.0, "cudnn": 4900.0}
_GAIN = {"none": 1.0, "mlp": 1.03, "layers": 1.075, "model": 1.09}


def sweep(
    attentions: tuple[str, ...] = tuple(_BASE), compiles: tuple[str, ...] = tuple(_GAIN)
) -> tuple[Row, ...]:
    """The one-device sweep: speeds fall and peaks grow with the sequence; math runs out of memory at 8,192."""
    rows = []
    for i, attention in enumerate(attentions):
        for mode in compiles:
            for power, seq in enumerate((1024, 2048, 4096, 8192)):
                fall = 1 - (0.25 if attention == "math" else 0.08) * power
                tok_s = _BASE[attention] * _GAIN[mode] * fall
                peak = 9 + 2.1 * 2**power * (1.3 if attention == "math" else 1) + 0.1 * i
                axes = {"attention": attention, "compile": mode, "seq": seq}
                if attention == "math" and seq == 8192:
                    rows.append(
                        failed("oom", "CUDA out of memory: tried to allocate 12.00 GiB", True, **axes)
                    )
                else:
                    rows.append(row(tok_s=tok_s, peak_gib=peak, **axes))
    return tuple(rows)


def story() -> tuple[Row, ...]:
    """Few rows with one of everything a report must say."""
    x = {"attention": "xformers"}
    state = DeviceState(
        throttle_reasons=("sw_thermal_slowdown", "gpu_idle"), foreign_processes=("71 python 2 GiB",)
    )
    breaks = (GraphBreak(reason="data dependent | jump", where="modeling_qwen2.py:212"),)
    broken = CompileReport(
        asked="model",
        graphs=3,
        graph_breaks=breaks,
        recompiles=("seq changed",),
        fallbacks=("frame 2: <LoweringException>",),
    )
    return (
        row(tok_s=3347, replicate=0),
        row(tok_s=3340, replicate=1),
        row(tok_s=3741, replicate=0, **x),
        row(tok_s=3300, replicate=1, device_after=state, **x),
        row(tok_s=4020, compile="layers", parity=WRONG, **x),
        row(tok_s=3900, compile="model", compiled=broken, **x),
        failed("oom", "CUDA out of memory", True, seq=8192),
        row(tok_s=3018, peak_gib=24.0, seq=8192, steps=2, notes=("capped at 24 GiB of 32",), **x),
        failed(
            "crashed",
            "SIGSEGV before a result",
            seq=8192,
            compile="layers",
            log_tail=("a ``` b", "<b> | c"),
            **x,
        ),
        failed("skipped", "math is measured as a baseline only", True, compile="layers"),
    )


def test_the_sample_rows_survive_the_way_to_disk_and_back() -> None:
    for one in (*sweep(), *story()):
        assert decode(encode(one)) == one
