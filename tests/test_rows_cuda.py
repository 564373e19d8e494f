"""The Triton kernels of a tile's rows against torch's own formulas, which define them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_volta import rows

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within a rounding or two of the dtype, of the largest value; in float32 of exp's argument, about 16."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    bar = max(4 * torch.finfo(dtype).eps, 4e-6)
    assert (found - wanted).abs().max() <= bar * wanted.abs().max()


@pytest.fixture(autouse=True)
def _triton_is_used() -> None:
    assert rows.kernels(torch.ones(1, device="cuda")) is not None, "Triton is not installed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 1000, 8192, 151_936])
def test_cross_entropy_and_its_gradients(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(65, vocab, device="cuda") * 4).to(dtype)
    labels = torch.randint(0, vocab, (65,), device="cuda")
    labels[::4] = -100
    power = torch.tensor(64.0, device="cuda")
    with rows.without_triton():
        wanted = rows.cross_entropy_(logits.clone(), labels, power, -100, True)
    found = rows.cross_entropy_(logits.clone(), labels, power, -100, True)
    assert torch.allclose(found[0], wanted[0], rtol=1e-5)
    near(found[1], wanted[1], dtype)
    kept = logits.clone()
    only, _ = rows.cross_entropy_(kept, labels, power, -100, False)
    assert torch.allclose(only, wanted[0], rtol=1e-5)
    assert torch.equal(kept, logits)


def test_a_label_outside_the_vocabulary_is_nan_and_reads_nothing_beyond() -> None:
    logits, power = torch.zeros(2, 10, device="cuda"), torch.ones((), device="cuda")
    loss, _ = rows.cross_entropy_(logits, torch.tensor([3, 10], device="cuda"), power, -100, True)
    assert loss.isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5000, 1536), (3, 7, 128), (2049, 3584)], ids=str)
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(*shape, device="cuda").to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], device="cuda").to(dtype)
    with rows.without_triton():
        wanted = rows.rms_norm(x, weight, 1e-6)
        dx, products = rows.rms_norm_backward(dy, x, weight, 1e-6)
    near(rows.rms_norm(x, weight, 1e-6), wanted, dtype)
    found_dx, found_products = rows.rms_norm_backward(dy, x, weight, 1e-6)
    near(found_dx, dx, dtype)
    near(found_products.sum(0), products.sum(0), torch.bfloat16)  # thousands of terms that cancel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 3), (1000, 8960)], ids=str)
def test_swiglu_and_its_gradients(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    g, u, dp = (torch.randn(*size, device="cuda").to(dtype) for _ in range(3))
    with rows.without_triton():
        wanted = rows.gate_(g.clone(), u, "silu")
        grads = rows.gate_backward_(g.clone(), u.clone(), dp.clone(), "silu")
    near(rows.gate_(g.clone(), u, "silu"), wanted, dtype)
    for found, true in zip(rows.gate_backward_(g.clone(), u.clone(), dp.clone(), "silu"), grads, strict=True):
        near(found, true, dtype)
