"""Tiling on a CUDA device: against float64 beside the untiled path, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch

from cp_volta.tiled_loss import tiled_cross_entropy
from tests.test_tiled_loss import error, stock

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("amp", [False, True])
def test_on_cuda_it_is_no_worse_than_stock_and_takes_less_memory(dtype: torch.dtype, amp: bool) -> None:
    torch.manual_seed(0)
    own = torch.float32 if amp else dtype
    h = torch.randn(3000, 256, device="cuda").to(own).requires_grad_()
    w = (torch.randn(32_000, 256, device="cuda") * 0.05).to(own).requires_grad_()
    labels = torch.randint(0, 32_000, (3000,), device="cuda")
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    right = torch.autograd.grad(stock(h64, w64, labels), (h64, w64))
    errors, peaks = [], []
    for loss in (lambda: stock(h, w, labels), lambda: tiled_cross_entropy(h, w, labels, tile=512)):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=dtype, enabled=amp and dtype != torch.float32):
            value = loss()
        grads = torch.autograd.grad(value * 1024, (h, w))
        peaks.append(torch.cuda.max_memory_allocated() - start)
        errors.append([error(g.double() / 1024, t) for g, t in zip(grads, right, strict=True)])
    assert all(mine <= 1.2 * theirs + 1e-6 for mine, theirs in zip(errors[1], errors[0], strict=True)), errors
    assert peaks[1] < peaks[0] / 2
