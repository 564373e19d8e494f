"""tc_volta::flash_attn on a CPU: every kernel there against float64, and as an op that compilers can trust."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tc_volta
from tests.attention_reference import BAR, Inputs, attention, inputs, ours, reference, worst

KERNELS = ("math", "flash")  # those of a CPU
HEADS = ((4, 4), (4, 2), (6, 2), (12, 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", BAR, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_outputs_lse_and_gradients_match_float64(kernel: str, dtype: torch.dtype, dim: int) -> None:
    for heads in HEADS:
        for causal in (False, True):
            given = inputs(heads, dim=dim, dtype=dtype)
            got = ours(given, kernel, causal=causal)
            assert [x.dtype for x in got[2:]] == [dtype] * 3
            assert worst(got, reference(given, causal=causal)) < BAR[dtype], (heads, causal)


@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_windows_and_queries_that_see_nothing(kernel: str) -> None:
    for dtype in (torch.float32, torch.float16):
        given = inputs((6, 2), dtype=dtype)
        seen = torch.rand(2, 1, 33, 33) > 0.4
        seen[0, :, 5] = False
        added = torch.zeros(2, 1, 33, 33, dtype=dtype).masked_fill(~seen, -torch.inf)
        added += torch.randn(2, 1, 33, 33).to(dtype)
        padding = torch.arange(33) < torch.tensor([33, 20])[:, None, None, None]
        for how in (
            {"mask": seen},
            {"mask": added},
            {"mask": padding},
            {"mask": padding, "causal": True},
            {"mask": torch.randn(33, 33).to(dtype), "causal": True},
            {"causal": True, "window": 7},
            {"causal": True, "window": 7, "mask": seen},
            {"causal": True, "window": 100},
        ):
            assert worst(ours(given, kernel, **how), reference(given, **how)) < BAR[dtype], how


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_without_a_key_is_zero_with_lse_minus_infinity_and_no_gradient(kernel: str) -> None:
    given = inputs()
    for nothing in (torch.tensor(-torch.inf), torch.tensor(torch.finfo(torch.float32).min)):
        mask = torch.zeros(33, 33)
        mask[4] = nothing
        out, lse, dq, dk, dv = ours(given, kernel, mask=mask)
        assert not out[:, :, 4].any()
        assert (lse[:, :, 4] == -torch.inf).all()
        assert not dq[:, :, 4].any()
        assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("seq", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_blocks_answer_instead_of_killing_the_process(kernel: str, seq: int, seq_k: int) -> None:
    q = torch.randn(1, 4, seq, 64, requires_grad=True)
    k = torch.randn(1, 2, seq_k, 64, requires_grad=True)
    out, lse = tc_volta.flash_attn(q, k, k, kernel=kernel, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape
    assert (lse == -torch.inf).all()
    assert not out.any()
    assert not q.grad.any()
    assert not k.grad.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_of_lse_is_right(kernel: str) -> None:
    given = inputs((4, 2), seq=9, dim=16, dtype=torch.float64, batch=1)
    mask = torch.rand(9, 9) > 0.3
    mask[3] = False

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = tc_volta.flash_attn(q, k, v, attn_mask=mask, kernel=kernel, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(both, given[:3])


def test_lse_alone_may_be_differentiated() -> None:
    given = inputs(dtype=torch.float64)
    _, lse = tc_volta.flash_attn(*given[:3], causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), given[:3])
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    want = torch.autograd.grad(attention(q, k, v, causal=True)[1].sum(), (q, k))
    torch.testing.assert_close((dq, dk), want)
    assert not dv.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_keys_merge_and_share_the_backward(kernel: str) -> None:
    given = inputs((4, 2), seq=33, seq_k=48, dtype=torch.float64)
    want = reference(given)
    cut = (slice(0, 17), slice(17, 48))
    q, k, v = (x.detach() for x in given[:3])
    parts = [tc_volta.flash_attn(q, k[:, :, c], v[:, :, c], kernel=kernel, return_lse=True) for c in cut]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum((o * (part - lse).exp()[..., None] for o, part in parts), torch.zeros(()))
    torch.testing.assert_close([out, lse], want[:2])
    grads = [
        tc_volta.flash_attn_backward(given.dout, q, k[:, :, c], v[:, :, c], out, lse, kernel=kernel)
        for c in cut
    ]
    torch.testing.assert_close(grads[0][0] + grads[1][0], want[2])
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], 2), want[3])
    torch.testing.assert_close(torch.cat([grads[0][2], grads[1][2]], 2), want[4])


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_are_served_a_broadcast_gradient_too(kernel: str) -> None:
    given = inputs()
    want = ours(Inputs(*given[:3], torch.ones_like(given.dout)), kernel, causal=True)
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in given[:3]]
    out = tc_volta.flash_attn(*turned, causal=True, kernel=kernel)
    out.sum().backward()
    torch.testing.assert_close([out, *(x.grad for x in turned)], [want[0], *want[2:]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_casts_the_inputs_and_stays_out_of_the_kernel(kernel: str) -> None:
    given = inputs((4, 2))
    v = given.v.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = tc_volta.flash_attn(given.q, given.k, v, causal=True, kernel=kernel, return_lse=True)
        stock = torch.nn.functional.scaled_dot_product_attention(
            given.q, given.k, v, is_causal=True, enable_gqa=True
        )
    assert (out.dtype, lse.dtype) == (stock.dtype, torch.float32) == (torch.bfloat16, torch.float32)
    half = [x.detach().bfloat16() for x in (given.q, given.k, v)]
    want, want_lse = tc_volta.flash_attn(*half, causal=True, kernel=kernel, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)  # in bfloat16 products it is off by 5e-2
    out.sum().backward()
    assert given.q.grad.dtype == torch.float32


def test_without_autocast_mixed_dtypes_raise() -> None:
    given = inputs()
    with pytest.raises(ValueError, match="float32, .*float32, .*float16"):
        tc_volta.flash_attn(given.q, given.k, given.v.half())


def opcheck_cases() -> list[tuple[str, dict[str, object]]]:
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    return [
        (kernel, how)
        for kernel in ("auto", *KERNELS)
        for how in ({"causal": True}, {"mask": mask}, {"causal": True, "window": 7}, {})
    ]


@pytest.mark.parametrize(("kernel", "how"), opcheck_cases())
def test_opcheck_is_green_forward(kernel: str, how: dict[str, object]) -> None:
    given = inputs()
    args = (*given[:3], how.get("mask"), how.get("causal", False), 0.125, how.get("window", 0), kernel)
    torch.library.opcheck(torch.ops.tc_volta.flash_attn.default, args)


@pytest.mark.parametrize("kernel", KERNELS)
def test_opcheck_is_green_backward(kernel: str) -> None:
    given = inputs()
    q, k, v = (x.detach() for x in given[:3])
    out, lse = tc_volta.flash_attn(q, k, v, causal=True, return_lse=True)
    for dlse in (None, torch.ones_like(lse)):
        args = (given.dout, dlse, q, k, v, out, lse, None, True, 0.125, 0, kernel)
        torch.library.opcheck(torch.ops.tc_volta.flash_attn_backward.default, args)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seq", [1, 33])
def test_fake_and_real_outputs_have_the_same_strides(kernel: str, seq: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in (torch.float32, torch.bfloat16):
        given = inputs(seq=seq, dtype=dtype)
        real = ours(given, kernel, causal=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = ours(Inputs(*(mode.from_tensor(x) for x in given)), kernel, causal=True)
        assert [(x.shape, x.stride(), x.dtype) for x in faked] == [
            (x.shape, x.stride(), x.dtype) for x in real
        ]


def test_meta_tensors_have_shapes() -> None:
    q = torch.empty(1, 4, 8, 64, device="meta")
    assert tc_volta.flash_attn(q, q, q, causal=True).shape == q.shape


def test_a_second_derivative_raises() -> None:
    given = inputs(dtype=torch.float64)
    out = tc_volta.flash_attn(*given[:3])
    (dq,) = torch.autograd.grad(out.sum(), given.q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn_backward"):
        dq.sum().backward()


def test_what_no_kernel_can_mean_raises_with_both_numbers() -> None:
    given = inputs((4, 2), seq=8, seq_k=12)
    q, k, v = given[:3]
    for message, call in {
        "8 and 12": lambda: tc_volta.flash_attn(q, k, v, causal=True),
        "4 query heads are no multiple of 3": lambda: tc_volta.flash_attn(
            q, k[:, [0, 1, 1]], v[:, [0, 1, 1]]
        ),
        "window is 4, causal False": lambda: tc_volta.flash_attn(q, k, v, window=4),
        r"\(8, 8\) does not broadcast": lambda: tc_volta.flash_attn(q, k, v, attn_mask=torch.ones(8, 8)),
        "attn_mask is bool .* got torch.int64": lambda: tc_volta.flash_attn(
            q, k, v, attn_mask=torch.ones(8, 12, dtype=torch.int64)
        ),
        "unknown kernel 'fast'; there are auto, flash": lambda: tc_volta.flash_attn(q, k, v, kernel="fast"),
        "3, 4 and 4 dimensions": lambda: tc_volta.flash_attn(q[0], k, v),
        "k and v alike": lambda: tc_volta.flash_attn(q, k, v[..., :32]),
        "gradient of attn_mask": lambda: tc_volta.flash_attn(
            q, k, v, attn_mask=torch.zeros(8, 12, requires_grad=True)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kernel", ["efficient", "xformers", "cudnn"])
def test_a_named_kernel_that_cannot_serve_raises_and_no_other_takes_its_place(kernel: str) -> None:
    given = inputs()
    with pytest.raises(ValueError, match=f"kernel '{kernel}' cannot serve this call: .*CUDA"):
        tc_volta.flash_attn(*given[:3], kernel=kernel)
