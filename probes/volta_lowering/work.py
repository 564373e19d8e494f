"""A cell of the compile matrix with Triton told to lower for another card, and the proof that it did."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from harness.cells import Task
from harness.rows import Fact, Result
from probes.compile_matrix import work as matrix
from probes.volta_lowering import VoltaAxes
from probes.volta_lowering.evidence import Lowered, lowered

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def run(axes: VoltaAxes, task: Task) -> Result:
    """The matrix's result with the label of an emulation; `unsupported` where kernels were not lowered as asked."""
    # Read when Triton compiles, and inherited by Inductor's compile workers, which start later.
    os.environ["TRITON_OVERRIDE_ARCH"] = axes.arch
    result = matrix.run(axes, task)
    return judged(
        result, axes.arch, lowered([Path(os.environ[name]) for name in _CACHES if name in os.environ])
    )


def judged(result: Result, arch: str, kernels: Lowered) -> Result:
    """`result` with what the kernels were lowered for; its verdict stands only if that is `arch`, for all of them."""
    wanted = arch.removeprefix("sm")
    card = ", ".join(kernels.assembled) or "the card that is here"
    note = (
        f"emulation: lowered as for sm_{wanted} by TRITON_OVERRIDE_ARCH={arch}, assembled for and run on {card}; "
        "it checks the compiler's path for that card, not that card"
    )
    facts: dict[str, Fact] = {
        "emulation": note,
        "kernels": kernels.count,
        "lowered_for": ", ".join(f"sm_{one}" for one in kernels.targets),
        "assembled_for": ", ".join(kernels.assembled),
        "kernels_with_dots": kernels.with_dots,
        "matrix_instructions": kernels.matrix,
        "fma": kernels.fma,
    }
    held = msgspec.structs.replace(result, facts=result.facts | facts, notes=(note, *result.notes))
    if result.status != "ok":
        return held
    if kernels.targets != (wanted,):
        found = f"lowered for {facts['lowered_for']}" if kernels.count else "no Triton kernel in its cache"
        reason = f"TRITON_OVERRIDE_ARCH={arch} did not decide every kernel: {found}"
        return msgspec.structs.replace(
            held, status="unsupported", reason=reason, verdict=None, verdict_reason=""
        )
    return msgspec.structs.replace(held, verdict_reason=f"emulated sm_{wanted}: {result.verdict_reason}")
