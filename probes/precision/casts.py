"""Roundings that compiled code leaves out: between fused operations Inductor keeps float32.

Eager rounds to the dtype after each operation, so 1,000 x 256 / 256 in float16 is inf; fused it is 1,000. That is by
design (pytorch issues 183607, 182131); Inductor's emulate_precision_casts puts the roundings back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.rows import Fact


def demonstrate(device: str) -> dict[str, Fact]:
    """1,000 x 256 / 256 in float16: in eager, compiled, and compiled with the roundings emulated."""
    x = torch.full((64,), 1000.0, dtype=torch.float16, device=device)
    y = torch.full((64,), 256.0, dtype=torch.float16, device=device)
    facts: dict[str, Fact] = {"fp16 1000*256/256, eager": _told(_chain(x, y))}
    for name, emulate in (("compiled", False), ("emulated", True)):
        compiled = torch.compile(_chain, options={"emulate_precision_casts": emulate})
        facts[f"fp16 1000*256/256, {name}"] = _told(compiled(x, y))
    return facts


def distance(gradients: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> float | None:
    """Norm of the difference of all gradients over the norm of eager's; None where one is not finite."""
    different = total = 0.0
    for name, want in eager.items():
        different += float((gradients[name].double() - want.double()).square().sum())
        total += float(want.double().square().sum())
    found = math.sqrt(different / total) if total else math.inf
    return found if math.isfinite(found) else None


def _chain(x: Tensor, y: Tensor) -> Tensor:
    return x * y / y


def _told(values: Tensor) -> str:
    return f"{float(values[0]):g}"
