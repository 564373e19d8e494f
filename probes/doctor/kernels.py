"""Which attention kernels are usable here for a dtype and head size, and why not the others.

Asked of tc_volta's own table, by capability alone: a card that torch cannot use yet is answered for too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.hardware import Capability, Inventory
from probes.doctor import installed
from probes.doctor.report import Line

if TYPE_CHECKING:
    import torch

TITLE = "attention kernels"
DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 256)
_HEADS, _KV_HEADS, _SEQ = 12, 2, 1024  # a grouped, causal call: Qwen2.5-1.5B


def lines(found: Inventory) -> list[Line]:
    """For each kind of device, one line per dtype and set of head sizes that are served alike."""
    torch, reason = installed.torch_or_reason()
    if torch is None:
        return [Line(what="all", value="unknown", mark="note", reason=reason)]
    rows = []
    for device, capability in devices(found):
        for dtype in DTYPES:
            rows += _for_dtype(device, capability, dtype, getattr(torch, dtype))
        rows.append(_grouped(device, capability, torch.float16))
    return rows


def devices(found: Inventory) -> list[tuple[str, Capability]]:
    """("cuda", capability) for each capability that computes here; ("cpu", (0, 0)) where there is none."""
    capabilities = {card.capability for card in found.cards if card.capability}
    meant = sorted(one for one in capabilities if one >= (7, 0)) or sorted(capabilities)
    return [("cuda", one) for one in meant] or [("cpu", (0, 0))]


def called(device: str, capability: Capability) -> str:
    """`CPU` or `sm_70`."""
    return "CPU" if device == "cpu" else "sm_{}{}".format(*capability)


def _answers(
    device: str, capability: Capability, dtype: torch.dtype, head_dim: int
) -> tuple[tuple[str, str], ...]:
    from tc_volta import Request, usable

    request = Request(
        device=device,
        capability=capability,
        dtype=dtype,
        heads=_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=head_dim,
        seq_q=_SEQ,
        seq_k=_SEQ,
        causal=True,
    )
    return tuple(usable(request).items())


def _for_dtype(device: str, capability: Capability, name: str, dtype: torch.dtype) -> list[Line]:
    alike: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for head_dim in HEAD_DIMS:
        # a reason names the size it was asked for; the sizes are listed beside it
        answers = tuple(
            (kernel, why.replace(f"head_dim {head_dim} ", "head size "))
            for kernel, why in _answers(device, capability, dtype, head_dim)
        )
        alike.setdefault(answers, []).append(head_dim)
    return [_line(f"{called(device, capability)} {name}", sizes, answers) for answers, sizes in alike.items()]


def _line(what: str, sizes: list[int], answers: tuple[tuple[str, str], ...]) -> Line:
    able = [name for name, why in answers if not why]
    refused: dict[str, list[str]] = {}
    for name, why in answers:
        if why:
            refused.setdefault(why, []).append(name)
    reason = "\n".join(f"not {', '.join(names)}: {why}" for why, names in refused.items())
    heads = "any head size" if len(sizes) == len(HEAD_DIMS) else f"head size {', '.join(map(str, sizes))}"
    if able == ["math"]:
        reason = f"math holds the whole score matrix in memory\n{reason}"
        return Line(what=what, value=f"math only ({heads})", mark="note", reason=reason)
    return Line(what=what, value=f"{', '.join(able)} ({heads})", reason=reason)


def _grouped(device: str, capability: Capability, dtype: torch.dtype) -> Line:
    from tc_volta import KERNELS

    able = [name for name, why in _answers(device, capability, dtype, HEAD_DIMS[0]) if not why]
    compact = [name for name in able if KERNELS[name].grouped]
    others = [name for name in able if name not in compact]
    reason = f"{', '.join(others)}: key/value heads are expanded first, and their gradients summed"
    value = f"compact heads in {', '.join(compact)}" if compact else "heads are expanded"
    return Line(what=f"{called(device, capability)} grouped queries", value=value, reason=reason)
