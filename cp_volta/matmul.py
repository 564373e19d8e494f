"""What the tiled ops share: tiles of rows, the dtype to compute in, and products summed over tiles.

Products of one tile are taken in the compute dtype, as the untiled path takes them; a sum over tiles lives in
a wider dtype, so that many small tiles round no worse than one large product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def tiles(rows: int, tile: int) -> Iterator[slice]:
    """Slices that cover `rows`, each of `tile` rows, the last as long as what is left."""
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))


def check_tile(tile: int | None, what: str) -> None:
    """Raise ValueError unless `tile` is a number of rows, or None for the default."""
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ValueError(f"{what}: a tile is a whole number of tokens, at least 1, or None; found {tile!r}")


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of a product of x and weight: autocast's where it is on (float64 stays), else their own.

    Raises ValueError where they differ and no autocast says what to do, as torch's own product would.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"activations in {x.dtype} and a weight in {weight.dtype}: use autocast, or cast one"
        )
    return x.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tiles are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b.

    On CUDA a half product goes into a float32 total inside the GEMM (cuBLAS, float32 output); a CPU has no such
    product, so there the operands, tiles both, are widened.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and a.dtype in HALF and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@torch.library.custom_op("cp_volta::scaled", mutates_args=())
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`, multiplied in factor's own (wide) dtype: no rounding, overflow or underflow before.

    Plain `x * factor` would cast a 0-dim factor to x's dtype first: 1/524288 is a subnormal float16.
    Of rows at a time, so that no wide copy of x exists.
    """
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rows = max(1, (1 << 24) // max(1, x[:1].numel()))
    for part in tiles(x.shape[0], rows):
        out[part] = x[part].to(factor.dtype) * factor
    return out


@scaled.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
