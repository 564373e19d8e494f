"""A committed run that claims of tests refer to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.rows import Row, encode


def write_run(root: Path) -> Path:
    """A run of two lowered kernels and one timed cell in `root`/results/run."""
    folder = root / "results" / "run"
    (folder / "rows").mkdir(parents=True)
    environment = {"stack": {"torch": "2.13.0"}, "device": {"name": "a CPU"}}
    meta = {
        "schema": 1,
        "suite": "s",
        "probe": "triton-lowering",
        "environments": {"e": environment},
        "cells": 3,
    }
    (folder / "run.json").write_bytes(msgspec.json.encode(meta))
    facts = {
        "triton": "3.7.1",
        "dots": "scalar FMA: 2,048 fma, no matrix instruction",
        "registers": 32,
        "spill_store_bytes": 8,
        "spill_load_bytes": 9,
        "shared_bytes": 16384,
        "shared_limit_bytes": 98304,
        "bf16_instructions": 0,
        "cubin_bytes": 266848,
    }
    axes = {"kernel": "dot", "target": "sm_70", "dtype": "fp16", "size": 64, "triton": "3.7.1"}
    common = {"suite": "s", "probe": "triton-lowering", "device": "cpu", "environment": "e"}
    rows = [
        Row(**common, cell="1" * 16, axes=axes, verdict="caveat", verdict_reason="scalar FMA", facts=facts,
            started_at="2026-12-01T10:00:00+00:00"),
        Row(**common, cell="2" * 16, axes={**axes, "triton": "3.3.1"}, status="error", reason="Unsupported | conversion",
            facts={"triton": "3.3.1"}, started_at="2026-12-01T10:00:01+00:00"),
        Row(**common, cell="3" * 16, axes={**axes, "kernel": "timed"}, tokens_per_step=100, step_s=(0.1, 0.1), verdict="ok"),
    ]  # fmt: skip
    for row in rows:
        (folder / "rows" / f"{row.cell}.r0.json").write_bytes(encode(row))
    return folder
