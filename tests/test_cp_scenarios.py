"""Bugs that other libraries of context parallelism had, each as a test; those not here stand beside what they touch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import cp_volta
from cp_volta.attention import attend
from cp_volta.group import init_cp_group
from cp_volta.merge import Partial
from probes.models.build import build
from tc_volta.op import flash_attn
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
S, D = 32, 16


def _qkv(dtype: torch.dtype, seq: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, seq, D, generator=generator).to(dtype) for heads in (4, 2, 2)]


def _gradient_dtypes(rank: int, dtype: torch.dtype, ulysses: int) -> list[torch.dtype]:
    cp = init_cp_group(2, ulysses=ulysses)
    q, k, v = (x[:, :, cp.positions(S)].requires_grad_() for x in _qkv(dtype))
    out = attend(q, k, v, cp)
    return [out.dtype, *(g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v)))]


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_what_they_are_of(dtype: torch.dtype, ulysses: int) -> None:
    """ring-flash-attention #87, yunchang ring_flash_attn.py: dq became bfloat16 whatever came in."""
    for dtypes in run_ranks(_gradient_dtypes, 2, dtype, ulysses):
        assert dtypes == [dtype] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_partials_are_merged_by_a_float32_lse_however_large(kernel: str, dtype: torch.dtype) -> None:
    """yunchang kernels/attention.py: an lse in half is off by 2.9e-2 at |lse| = 15, and some kernels gave zeros."""
    q, k, v = _qkv(dtype)
    q = q * 8
    whole = flash_attn(q, k, v, kernel=kernel)
    assert isinstance(whole, Tensor)
    total = Partial(q, torch.float32)
    for keys in (slice(0, S // 2), slice(S // 2, S)):
        out, lse = flash_attn(q, k[:, :, keys], v[:, :, keys], kernel=kernel, return_lse=True)
        assert lse.dtype == torch.float32
        assert lse.abs().max() > 15
        total.add(slice(0, S), out, lse)
    error = (total.out - whole.float()).abs().max() / whole.float().abs().max()
    assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.mark.parametrize("seq", [1, 7, 16, 33])
@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_an_lse_has_one_value_for_each_query_and_no_padding(kernel: str, seq: int) -> None:
    """yunchang #122: the efficient kernel pads lse to 32."""
    q, k, v = _qkv(torch.float32, seq)
    _, lse = flash_attn(q, k, v, kernel=kernel, return_lse=True)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * D**-0.5
    assert lse.shape == q.shape[:3]
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


_KWARGS: list[dict[str, Any]] = [
    {"causal": causal, "scale": scale, "window": window, "packed": packed, "kernel": kernel}
    for causal, scale, window, packed, kernel in itertools.product(
        (True, False), (None, 0.1), (None, 5), (False, True), ("auto", "math", "flash")
    )
    if causal or window is None
]


def _every_kwarg(rank: int, ulysses: int) -> list[float]:
    cp = init_cp_group(2, ulysses=ulysses)
    at = cp.positions(S)
    documents = torch.tensor([[0] * 13 + [1] * (S - 13)], dtype=torch.int32)
    errors = []
    for case in _KWARGS:
        inputs = [x.requires_grad_() for x in _qkv(torch.float32)]
        kwargs = dict(case)
        packed = documents if kwargs.pop("packed") else None
        want = torch.autograd.grad(_written_out(*inputs, case, packed).square().sum(), inputs)
        held = [x.detach()[:, :, at].requires_grad_() for x in inputs]
        out = attend(*held, cp, documents=packed, **kwargs)
        got = torch.autograd.grad(out.square().sum(), held)
        errors.append(
            max(float((g - w[:, :, at]).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True))
        )
    return errors


def _written_out(q: Tensor, k: Tensor, v: Tensor, case: dict[str, Any], documents: Tensor | None) -> Tensor:
    apart = torch.arange(S)[:, None] - torch.arange(S)
    seen = torch.ones(S, S, dtype=torch.bool)
    if case["causal"]:
        seen &= apart >= 0
    if case["window"]:
        seen &= apart < case["window"]
    if documents is not None:
        seen &= documents[0, :, None] == documents[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case["scale"], enable_gqa=True)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_backward_runs_and_is_right_under_every_set_of_arguments(ulysses: int) -> None:
    """yunchang #149: a None too few among the gradients; pytorch #147793, torchtitan #3340: the math kernel broke."""
    for errors in run_ranks(_every_kwarg, 2, ulysses):
        for error, case in zip(errors, _KWARGS, strict=True):
            assert error < 5e-6, case


def _windows(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    model: Any = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32, attention="eager")
    config = model.config
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 8, 1
    config.layer_types = ["full_attention"] + ["sliding_attention"] * (config.num_hidden_layers - 1)
    torch.manual_seed(0)
    model = type(model)(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    want = model(input_ids=ids).logits
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    weights = model.state_dict()
    full = type(model)(config)
    full.load_state_dict(weights)
    other = full.eval()(input_ids=ids).logits
    cp = init_cp_group(2)
    at = cp.positions(64)
    cp_volta.patch_for_cp(model, cp)
    return model(input_ids=ids[:, at]).logits.detach(), want[:, at].detach(), other[:, at].detach()


def test_the_sliding_windows_of_a_qwen2_config_are_honoured() -> None:
    """prime-rl #2828, TransformerEngine #3527, sglang #33353: use_sliding_window was ignored without a word."""
    for got, want, without in run_ranks(_windows, 2):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        assert (got - without).abs().max() > 1e-3  # the windows do something here


def _compiled_and_sharded(rank: int, ulysses: int, steps: int) -> list[tuple[float, float]]:
    found = []
    ids = torch.randint(0, 500, (steps, 1, 64), generator=torch.Generator().manual_seed(1))
    for compiled in (False, True):
        model: Any = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
        cp = init_cp_group(4, ulysses=ulysses)
        cp_volta.patch_for_cp(model, cp)
        for layer in model.get_decoder().layers:
            if compiled:
                layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, mesh=cp.dp_cp_mesh)
        fully_shard(model, mesh=cp.dp_cp_mesh)
        cp_volta.sum_gradients(model, cp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in ids:
            optimizer.zero_grad()
            shard = cp_volta.shard_batch({"input_ids": batch, "labels": batch}, cp)
            assert shard.labels is not None
            loss = cp_volta.cp_loss(model(**shard.inputs).logits, shard.labels, cp)
            loss.backward()
            norm = cp_volta.clip_grad_norm(model, 1.0)
            optimizer.step()
        found.append((float(loss), float(norm)))
    return found


@pytest.mark.parametrize("ulysses", [4, 2])
def test_compiled_exchanges_and_fsdps_reductions_do_not_wait_for_each_other(ulysses: int) -> None:
    """prime-rl #3195: reordered across ranks they deadlocked; two communicators of the hybrid beside FSDP2's."""
    for plain, compiled in run_ranks(_compiled_and_sharded, 4, ulysses, 5):
        assert compiled == pytest.approx(plain, rel=1e-4)


def _half_on_a_cpu(rank: int) -> list[float]:
    """Errors of dk and dv, fp16, six query heads to a key/value head."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, 512, D, generator=generator).half() for h in (12, 2, 2, 12)]
    q, k, v, dout = (x.double().requires_grad_(i < 3) for i, x in enumerate(whole))
    want = torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (k, v), dout
    )
    cp = init_cp_group(2)
    at = cp.positions(512)
    *held, mine = (x[:, :, at].requires_grad_(i < 3) for i, x in enumerate(whole))
    got = torch.autograd.grad(attend(*held, cp), held[1:], mine)
    return [
        float((g.double() - w[:, :, at]).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True)
    ]


def test_grouped_gradients_in_fp16_keep_fp16s_precision_on_a_cpu() -> None:
    """The CPU's half kernel is 1.9e-3 off where six query heads share a key; parity is asked to 2e-3 and reached 2.3e-3."""
    for errors in run_ranks(_half_on_a_cpu, 2):
        assert max(errors) < 6e-4
