"""Whether this device computes in bfloat16 itself, by emulation, or not at all: asked, and tried."""

from __future__ import annotations

from typing import Literal

import torch

Support = Literal["native", "emulated", "none", "unknown"]


def support(device: str) -> tuple[Support, str]:
    """What a product in bfloat16 is here, and how that is known.

    The product is really formed and held against float64's; native or emulated is what torch says of the device.
    """
    if why := _fails(device):
        return "none", why
    native, source = _native(device)
    if native is None:
        return "unknown", f"a product is right; {source}"
    return ("native" if native else "emulated"), f"a product is right; {source}"


def _fails(device: str) -> str:
    """Why a product of two [64, 64] matrices is not right; "" where it is."""
    a = (torch.arange(64 * 64, device=device, dtype=torch.float32).reshape(64, 64) % 7 - 3).bfloat16()
    try:
        got = a @ a.T
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    want = a.double() @ a.double().T
    off = float((got.double() - want).abs().max() / want.abs().max())
    # The factors are exact small integers: only the result is rounded, to 8 bits.
    return "" if off <= 2.0**-8 else f"a product in bfloat16 is off by {off:.2g} of its largest element"


def _native(device: str) -> tuple[bool | None, str]:
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        major, minor = torch.cuda.get_device_capability()
        return native, f"torch.cuda.is_bf16_supported(including_emulation=False), sm_{major}{minor}"
    if not hasattr(torch.cpu, "get_capabilities"):  # torch < 2.11
        return None, "this torch does not tell what the CPU has"
    has = torch.cpu.get_capabilities()
    flags = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if has.get(name)]
    return bool(flags), f"torch.cpu.get_capabilities: {', '.join(flags) or 'no bf16 instruction'}"
