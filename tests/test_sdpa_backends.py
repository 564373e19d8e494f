"""sdpa-backends: a kernel that lies in a mask, a gradient or its name is found out; honest ones are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.rows import Result
from probes import sdpa_backends
from probes.sdpa_backends import SdpaAxes, Shape, work
from probes.sdpa_backends.calls import inputs, reference
from probes.sdpa_backends.work import run
from tc_volta.kernels import KERNELS
from tc_volta.record import Pair, Saved, Triple
from tests.tasks import task
from tests.test_cli import harness

MASKS = ("none", "causal", "padding", "additive", "blind")
TORCH_SDPA = F.scaled_dot_product_attention


def cell(device: str = "cpu", seed: int = 0, **axes: object) -> Result:
    sizes = {"kv_heads": "4 2", "head_dims": "16 64", "seqs": "2 33"}
    return run(msgspec.convert(sizes | axes, SdpaAxes), task(device, seed=seed))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("through", ["torch", "tc_volta"])
@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_honest_kernels_are_right_and_are_the_ones_that_ran(through: str, kernel: str, mask: str) -> None:
    for dtype in ("fp32", "fp16", "bf16"):
        found = cell(through=through, kernel=kernel, mask=mask, dtype=dtype)
        assert found.verdict == "ok", found.verdict_reason
        assert found.attention
        assert (found.attention.asked, found.attention.ran, found.attention.honoured) == (
            kernel,
            kernel,
            True,
        )
        assert (found.facts["shapes"], found.facts["refused"]) == (8, 0)


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_gradient_of_its_own_output(mask: str) -> None:
    axes = SdpaAxes(mask=mask, kv_heads="2", dtype="fp32")  # type: ignore[arg-type]
    given = inputs(axes, Shape(2, 8, 9), "cpu", 0)
    wide = [x.double().requires_grad_() for x in given[:3]]
    given_mask = given.mask.double() if mask == "additive" and given.mask is not None else given.mask
    with sdpa_kernel(SDPBackend.MATH):
        out = TORCH_SDPA(*wide, attn_mask=given_mask, is_causal=mask == "causal", enable_gqa=True)
    grads = torch.autograd.grad(out, wide, given.dout.double())
    for got, ruler in zip((out, *grads), reference(given, causal=mask == "causal"), strict=True):
        torch.testing.assert_close(got.detach(), ruler.value, rtol=1e-12, atol=1e-12)


def test_blind_queries_are_in_the_mask_and_come_out_as_zero() -> None:
    given = inputs(SdpaAxes(mask="blind"), Shape(4, 8, 8), "cpu", 0)
    assert given.mask is not None
    assert (~given.mask.any(-1)).sum(-1).flatten().tolist() == [2, 4]
    assert not reference(given, causal=False)[0].value[1, :, :4].any()


@pytest.mark.parametrize("mask", ["causal", "padding", "additive", "blind"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_kernel_that_ignores_the_mask_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, mask: str, dtype: str
) -> None:
    def deaf(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **ignored: object) -> Tensor:
        return TORCH_SDPA(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", deaf)
    found = cell(kernel="flash", mask=mask, dtype=dtype)
    assert found.verdict == "mismatch", found.verdict_reason
    assert "is wrong" in found.verdict_reason


def lying(monkeypatch: pytest.MonkeyPatch, lie: Callable[[Triple], Triple]) -> None:
    stock = KERNELS["flash"]

    def backward(dout: Tensor, saved: Saved) -> Triple:
        return lie(stock.backward(dout, saved))

    monkeypatch.setitem(KERNELS, "flash", dataclasses.replace(stock, backward=backward))


@pytest.mark.parametrize(("at", "name"), [(0, "dq"), (1, "dk"), (2, "dv")])
def test_a_gradient_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch, at: int, name: str) -> None:
    def off(grads: Triple) -> Triple:
        return tuple(g * (1.02 if i == at else 1.0) for i, g in enumerate(grads))  # type: ignore[return-value]

    lying(monkeypatch, off)
    for dtype in ("fp32", "fp16"):
        found = cell(through="tc_volta", kernel="flash", dtype=dtype)
        assert found.verdict == "mismatch", found.verdict_reason
        assert f": {name} is wrong" in found.verdict_reason


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_nan_or_infinity_in_a_gradient_is_nonfinite(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def poison(grads: Triple) -> Triple:
        grads[1][0, 0, 0, 0] = value
        return grads

    lying(monkeypatch, poison)
    found = cell(through="tc_volta", kernel="flash")
    assert found.verdict == "nonfinite"
    assert "dk is not finite" in found.verdict_reason


def test_an_output_of_another_dtype_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        return TORCH_SDPA(q.float(), k.float(), v.float(), **how)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", wide)
    found = cell(dtype="fp16")
    assert found.verdict == "mismatch"
    assert "out has a wrong shape or dtype" in found.verdict_reason


def test_another_kernel_than_asked_for_is_a_mismatch_though_its_values_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(work_kernels(), "flash", SDPBackend.MATH)
    found = cell(kernel="flash")
    assert found.verdict == "mismatch"
    assert "asked for flash, forward ran math, backward ran math" in found.verdict_reason
    assert found.attention
    assert not found.attention.honoured


def work_kernels() -> dict[str, SDPBackend]:
    from probes.sdpa_backends import calls

    return calls._TORCH


def test_a_backward_alone_by_another_kernel_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(KERNELS["flash"], backward=KERNELS["math"].backward, grouped=False)
    monkeypatch.setitem(KERNELS, "flash", other)
    found = cell(through="tc_volta", kernel="flash")
    assert found.verdict == "mismatch"
    assert "asked for flash, backward ran math" in found.verdict_reason


def test_a_plain_call_that_falls_to_math_is_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(SDPBackend.MATH if grouped else SDPBackend.FLASH_ATTENTION):
            return TORCH_SDPA(q, k, v, **how)  # type: ignore[arg-type]

    assert cell().verdict == "ok"
    monkeypatch.setattr(F, "scaled_dot_product_attention", narrow)
    found = cell()
    assert found.verdict == "caveat"
    assert "fell to math, all scores in memory, on 4: heads 4/2" in found.verdict_reason


def test_refusals_are_told_in_the_kernels_words() -> None:
    found = cell(through="tc_volta", kernel="efficient")
    assert (found.status, found.verdict) == ("unsupported", None)
    assert "all 8 shapes refused" in found.reason
    assert "the CUTLASS kernel is for CUDA" in found.reason
    assert "No viable backend" in cell(kernel="cudnn").reason


def test_a_kernel_that_refuses_some_shapes_is_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = dataclasses.replace(
        KERNELS["flash"], unusable=lambda r: "head_dim 64 is too wide" if r.head_dim == 64 else ""
    )
    monkeypatch.setitem(KERNELS, "flash", picky)
    found = cell(through="tc_volta", kernel="flash")
    assert found.verdict == "caveat"
    assert "right on 4 of 8 shapes" in found.verdict_reason
    assert "head_dim 64 is too wide" in found.verdict_reason
    assert found.facts["refused"] == 4


def test_a_backward_that_fails_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dout: Tensor, saved: Saved) -> Triple:
        raise RuntimeError("no backward for this head_dim")

    monkeypatch.setitem(KERNELS, "flash", dataclasses.replace(KERNELS["flash"], backward=fail))
    found = cell(through="tc_volta", kernel="flash")
    assert found.verdict == "mismatch"
    assert "forward was accepted, backward failed: no backward for this head_dim" in found.verdict_reason


def test_too_little_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: object) -> Pair:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setitem(KERNELS, "flash", dataclasses.replace(KERNELS["flash"], forward=short))
    with pytest.raises(torch.OutOfMemoryError):
        cell(through="tc_volta", kernel="flash")


def test_a_wrong_shape_or_dtype_is_no_number() -> None:
    given = inputs(SdpaAxes(), Shape(4, 8, 8), "cpu", 0)
    ruler = reference(given, causal=True)[0]
    assert work._error(ruler.value[..., :4].float(), ruler, torch.float32) == float("inf")
    assert work._error(ruler.value, ruler, torch.float32) == float("inf")
    assert work._error(ruler.value.float(), ruler, torch.float32) < 1e-6


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"kv_heads": "3"}, "4 query heads are no multiple of 3"),
        ({"seqs": "1"}, "seqs are 2 or more"),
        ({"head_dims": "64x"}, "apart by spaces"),
        ({"head_dims": ""}, "apart by spaces"),
        ({"seqs": "0"}, "apart by spaces"),
    ],
)
def test_sizes_that_cannot_be_are_refused(axes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SdpaAxes(**{"mask": "blind", **axes})  # type: ignore[arg-type]


def test_the_command_refuses_bad_input_and_answers_good_input() -> None:
    done = harness("sdpa-backends", "kv_heads=3", "--device", "cpu", module="harness.probe")
    assert (done.returncode, "no multiple of 3" in done.stderr) == (2, True)
    assert "reached through tc_volta" in sdpa_backends.skip(SdpaAxes(kernel="xformers"), "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["math", "efficient", "flash", "cudnn"])
def test_on_a_gpu_what_the_op_accepts_ran_and_is_right(kernel: str, mask: str) -> None:
    on_a_gpu("tc_volta", kernel, mask)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("kernel", ["math", "efficient", "flash"])
def test_on_a_gpu_what_torch_accepts_ran_and_is_right(kernel: str, mask: str) -> None:
    on_a_gpu("torch", kernel, mask)


def on_a_gpu(through: str, kernel: str, mask: str) -> None:
    found = cell("cuda", through=through, kernel=kernel, mask=mask, dtype="fp16", seqs="64 129")
    assert found.status in ("ok", "unsupported"), found.reason
    if found.status == "ok":
        assert found.verdict in ("ok", "caveat"), found.verdict_reason
        assert found.attention
        assert found.attention.ran == kernel
