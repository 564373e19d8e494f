"""Tiled MLP, norms and projections against the untiled path: alone, together, and with what surrounds them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForSequenceClassification

from cp_volta.activation import ACTIVATIONS
from cp_volta.linear import Linear, linear_of
from cp_volta.recompute import SecondForward
from cp_volta.tiled_ffn import tiled_mlp
from cp_volta.tiled_norm import tiled_rms_norm
from cp_volta.tiled_projections import rotate, tiled_qkv
from cp_volta.tiling import tile, untile
from probes.models.build import build
from tests.allocations import allocations
from tests.test_tiled_loss import close, same, step

MODELS = ("tiny-qwen2-4h", "tiny-qwen3-6h", "tiny-llama-4h")
Wrt = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers has it, for autograd to differentiate; wide throughout in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) * 0.3).requires_grad_()


def mlp_case(
    tokens: int = 19, dtype: torch.dtype = torch.float64
) -> tuple[Wrt, Callable[..., Tensor], Callable[..., Tensor]]:
    """(leaves, tiled, plain): a normed MLP, its gate with a bias and an adapter."""
    torch.manual_seed(0)
    x, norm = leaf(2, tokens, 8, dtype=dtype), leaf(8, dtype=dtype)
    gate, up, down, bias = (leaf(*s, dtype=dtype) for s in ((24, 8), (24, 8), (8, 24), (24,)))
    lower, upper = leaf(3, 8, dtype=dtype), leaf(24, 3, dtype=dtype)

    def tiled(tile: int | None = None, activation: str = "silu", **more: bool) -> Tensor:
        linears = (Linear(weight=gate, bias=bias, down=lower, up=upper, scale=2.0), Linear(weight=up))
        return tiled_mlp(
            x, *linears, Linear(weight=down), norm_weight=norm, activation=activation, tile=tile, **more
        )

    def plain(activation: str = "silu") -> Tensor:
        n = rms_norm(x, norm, 1e-6)
        g = F.linear(n, gate, bias) + 2.0 * F.linear(F.linear(n, lower), upper)
        return F.linear(ACTIVATIONS[activation].forward(g) * F.linear(n, up), down)

    return (x, norm, gate, up, down, bias, lower, upper), tiled, plain


def gradients(y: Tensor, wrt: Wrt) -> Wrt:
    torch.manual_seed(5)
    return torch.autograd.grad((y * torch.randn_like(y)).sum(), wrt)


@given(tokens=st.integers(1, 20), size=st.integers(1, 45))
@settings(max_examples=20, deadline=None)
def test_an_mlp_with_norm_bias_and_adapter_is_exact_for_any_tile(tokens: int, size: int) -> None:
    wrt, tiled, plain = mlp_case(tokens)
    close((tiled(size),), (plain(),), 1e-12)
    close(gradients(tiled(size), wrt), gradients(plain(), wrt), 1e-11)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_has_the_derivative_that_torch_has(activation: str) -> None:
    wrt, tiled, plain = mlp_case()
    found, wanted = (gradients(f(activation=activation), wrt) for f in (tiled, plain))
    close(found, wanted, 1e-11)


@given(tokens=st.integers(1, 20), size=st.integers(1, 45))
@settings(max_examples=15, deadline=None)
def test_a_norm_is_exact_for_any_tile(tokens: int, size: int) -> None:
    torch.manual_seed(0)
    wrt = (leaf(2, tokens, 8), leaf(8))
    close((tiled_rms_norm(*wrt, 1e-6, tile=size),), (F.rms_norm(wrt[0], (8,), wrt[1], 1e-6),), 1e-12)
    plain = F.rms_norm(wrt[0], (8,), wrt[1], 1e-6)
    close(gradients(tiled_rms_norm(*wrt, 1e-6, tile=size), wrt), gradients(plain, wrt), 1e-11)


def qkv_case(
    tokens: int = 13, batch: int = 2, positions: int = 1
) -> tuple[Wrt, Callable[..., Tensor], Callable[[], Tensor]]:
    """(leaves, tiled, plain): all three outputs in one, with a norm, biases, head norms and rotary positions."""
    torch.manual_seed(0)
    x, norm, q_norm, k_norm = leaf(batch, tokens, 12), leaf(12), leaf(4), leaf(4)
    weights = [leaf(16, 12), leaf(8, 12), leaf(8, 12)]
    biases = [leaf(16), leaf(8), leaf(8)]
    angle = torch.rand(positions, tokens, 2, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()

    def tiled(size: int | None = None) -> Tensor:
        linears = [Linear(weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]
        made = tiled_qkv(x, *linears, cos, sin, norm_weight=norm, head_norms=(q_norm, k_norm), tile=size)
        return torch.cat(made, 1)

    def plain() -> Tensor:
        n = rms_norm(x, norm, 1e-6)
        q, k, v = (F.linear(n, w, b).unflatten(-1, (-1, 4)) for w, b in zip(weights, biases, strict=True))
        q, k = rms_norm(q, q_norm, 1e-6), rms_norm(k, k_norm, 1e-6)
        turned = [
            torch.stack([rotate(t[b], cos[b % positions], sin[b % positions]) for b in range(batch)])
            for t in (q, k)
        ]
        return torch.cat([t.transpose(1, 2) for t in (*turned, v)], 1)

    return (x, norm, q_norm, k_norm, *weights, *biases), tiled, plain


@given(tokens=st.integers(1, 15), size=st.integers(1, 20), positions=st.sampled_from([1, 2]))
@settings(max_examples=15, deadline=None)
def test_projections_are_exact_for_any_tile_and_positions_of_one_or_each_sequence(
    tokens: int, size: int, positions: int
) -> None:
    wrt, tiled, plain = qkv_case(tokens, positions=positions)
    close((tiled(size),), (plain(),), 1e-12)
    close(gradients(tiled(size), wrt), gradients(plain(), wrt), 1e-11)


def test_an_input_that_is_not_contiguous_is_taken_as_it_is() -> None:
    wrt, _, _ = mlp_case()
    x = leaf(8, 19, 2)
    y = tiled_rms_norm(x.permute(2, 1, 0), wrt[1], 1e-6, tile=4)
    wanted = F.rms_norm(x.permute(2, 1, 0), (8,), wrt[1], 1e-6)
    close(gradients(y, (x, wrt[1])), gradients(wanted, (x, wrt[1])), 1e-11)
    y = tiled_mlp(x.permute(2, 1, 0), *(Linear(weight=w) for w in wrt[2:5]), tile=4)
    n = x.permute(2, 1, 0)
    wanted = F.linear(F.silu(F.linear(n, wrt[2])) * F.linear(n, wrt[3]), wrt[4])
    close(gradients(y, (x, *wrt[2:5])), gradients(wanted, (x, *wrt[2:5])), 1e-11)


def test_what_came_from_above_is_left_as_it_was() -> None:
    """A gradient belongs to autograd: others may still read it."""
    for wrt, tiled, _ in (mlp_case(), qkv_case()):
        y = tiled(4)
        above = torch.randn_like(y)
        kept = above.clone()
        torch.autograd.grad(y, wrt, above)
        assert torch.equal(above, kept)
    x, w = leaf(6, 8), leaf(8)
    above = torch.ones(6, 8, dtype=torch.float64)
    torch.autograd.grad(tiled_rms_norm(x, w, 1e-6, tile=4), (x, w), above)
    assert (above == 1).all()


def test_frozen_weights_cost_no_gradient() -> None:
    wrt, tiled, plain = mlp_case()
    frozen = [w.requires_grad_(False) for w in wrt[1:6]]
    assert frozen
    close(gradients(tiled(5), (wrt[0], *wrt[6:])), gradients(plain(), (wrt[0], *wrt[6:])), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("amp", [False, True])
def test_half_precision_is_no_worse_than_the_untiled_path(dtype: torch.dtype, amp: bool) -> None:
    for make in (mlp_case,):
        wrt, tiled, plain = make()
        right = gradients(plain(), wrt)
        with torch.no_grad():
            for t in wrt:
                t.data = t.data.to(torch.float32 if amp else dtype)
        for t in wrt:
            t.grad = None
        with torch.autocast("cpu", dtype=dtype, enabled=amp):
            y, stock = tiled(5), plain()
        assert y.dtype == stock.dtype == dtype
        mine, theirs = (gradients(each, wrt) for each in (y, stock))
        for a, b, true in zip(mine, theirs, right, strict=True):
            assert a.dtype == b.dtype
            floor = torch.finfo(dtype).eps * true.norm()
            assert (a - true).norm() <= 1.2 * (b - true).norm() + floor


def test_the_ops_obey_the_rules_of_custom_ops() -> None:
    wrt, _, _ = mlp_case(7, torch.float32)
    x, norm, gate, up, down = (t for t in wrt[:5])
    rest = ([1.0] * 3, "silu", 1e-6, 4, torch.float32, torch.float32, False)
    opcheck(torch.ops.cp_volta.tiled_mlp.default, (x[0], [norm, gate, up, down], "nw,w,w", *rest))
    opcheck(torch.ops.cp_volta.tiled_rms_norm.default, (x[0], norm, 1e-6, 4))
    cos = torch.ones(1, 7, 4)
    tensors = [t.detach().float().requires_grad_() for t in (leaf(8, 8), leaf(4, 8), leaf(4, 8))]
    rest = ([1.0] * 3, 1e-6, 3, torch.float32, torch.float32)  # type: ignore[assignment]
    opcheck(torch.ops.cp_volta.tiled_qkv.default, (x, cos, cos, tensors, "|w,w,w", *rest))


def test_a_second_forward_whose_result_nobody_reads_computes_nothing_and_still_has_its_gradients() -> None:
    wrt, tiled, plain = mlp_case()
    y = tiled(5, unused=True)
    assert y.abs().max() == 0
    assert y.untyped_storage().nbytes() == 8
    close(gradients(y, wrt), gradients(plain(), wrt), 1e-11)


# In transformers' own models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def stock(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, tuple[float, dict[str, Tensor]]]:
    model = build(request.param, device="cpu", dtype=torch.float32)
    return model, step(model)


@pytest.mark.parametrize("sizes", list(itertools.product((False, 7), repeat=4))[1:], ids=str)
def test_every_part_alone_and_together_leaves_loss_and_gradients_as_they_were(
    stock: tuple[PreTrainedModel, tuple[float, dict[str, Tensor]]], sizes: tuple[int, ...]
) -> None:
    model, wanted = stock
    tile(model, **dict(zip(("loss", "mlp", "norms", "projections"), sizes, strict=True)))
    same(step(model), wanted)
    untile(model)
    same(step(model), wanted)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "tc_volta"])
def test_padding_and_positions_of_its_own_reach_the_attention(attention: str) -> None:
    import tc_volta

    name = tc_volta.attention_name("auto") if attention == "tc_volta" else attention
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32, attention=name)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 12:] = 0
    more = {"attention_mask": mask, "position_ids": torch.arange(38).view(2, 19) % 23}
    wanted = step(model, **more)
    tile(model, loss=8, mlp=8, norms=8, projections=8)
    same(step(model, **more), wanted)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_tiled_model_is_one_graph_and_right(checkpointing: bool) -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile(model, loss=8, mlp=8, norms=8, projections=8)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        same(step(model), wanted)
    model.compile(backend="aot_eager", fullgraph=True)
    same(step(model), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_grad_scaler_trains_as_the_stock_model_does(dtype: torch.dtype) -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    right = step(model)
    errors = []
    for tiled in (False, True):
        if tiled:
            tile(model, loss=8, mlp=8, norms=8, projections=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with torch.autocast("cpu", dtype=dtype):
            ids = torch.randint(0, 512, (2, 19), generator=torch.Generator().manual_seed(3))
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        scaler.scale(loss).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.unscale_(optimizer)
        errors.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert right[1].keys() == errors[0].keys() == errors[1].keys()
    for name, grad in errors[0].items():
        assert errors[1][name].dtype == torch.float32
        assert (errors[1][name] - grad).norm() <= 8 * torch.finfo(dtype).eps * grad.norm(), name


def test_generation_with_a_cache_still_works() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32).eval()
    ids = torch.randint(1, 512, (1, 9))
    how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    wanted = model.generate(ids, **how)
    tile(model)
    assert torch.equal(model.generate(ids, **how), wanted)


def test_what_is_wide_never_exists_for_the_whole_sequence() -> None:
    model = build("tiny-qwen2-12h", device="cpu", dtype=torch.float32)
    ids = torch.randint(0, 512, (1, 1500))
    wide = 1500 * 288 * 4  # hidden 96, MLP 288
    tile(model, loss=64, mlp=False, norms=False, projections=False)
    peaks = []
    for more in ({}, {"mlp": 64}, {"mlp": 64, "norms": 64, "projections": 64}):
        tile(model, **{"loss": 64, "mlp": False, "norms": False, "projections": False, **more})
        model.zero_grad()
        with allocations() as seen:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(seen.peak_bytes)
        assert (seen.largest_bytes >= wide) == (not more)
    assert peaks[1] < peaks[0] - 4 * wide  # two layers, each with at least gate and up saved
    assert peaks[2] < peaks[1] - 4 * 1500 * 96 * 4


def test_a_copy_of_a_tiled_model_uses_its_own_weights() -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    tile(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert math.isclose(step(other)[0], math.log(512), rel_tol=1e-5)
    assert not math.isclose(step(model)[0], math.log(512), rel_tol=1e-5)


def test_untiling_leaves_no_trace() -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    tile(model)
    assert list(model.state_dict()) == keys
    assert untile(model) == 2 + 2 * 4 + 1  # the model, its head, four modules a layer, the last norm
    assert untile(model) == 0
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_layer_of_which_only_the_gradient_is_asked_skips_its_last_product() -> None:
    """Inside a checkpoint's second forward the MLP computes nothing, and the gradients are right."""
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile(model, loss=8, mlp=8, norms=8, projections=8)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _with_second_forward
    same(step(model), wanted)


def _with_second_forward(function: Callable[..., object], *args: object) -> object:
    import contextlib

    contexts = lambda: (contextlib.nullcontext(), SecondForward())  # noqa: E731
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def test_what_cannot_be_tiled_is_refused_before_anything_changes() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="at least 1"):
        tile(model, mlp=0.5)  # type: ignore[arg-type]
    model.config.hidden_act = "mish"
    with pytest.raises(ValueError, match="'mish' cannot be tiled; there are silu"):
        tile(model)
    model.config.hidden_act = "silu"
    model.model.layers[1].mlp.up_proj = nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match="layer 1: up_proj is Bilinear"):
        tile(model)
    assert untile(model) == 0
    config = Qwen2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ValueError, match="Qwen2ForSequenceClassification cannot be tiled; there are"):
        tile(Qwen2ForSequenceClassification(config))


# Sharded --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_head", [True, False], ids=["head in the root", "head sharded apart"])
@pytest.mark.parametrize("compute", [None, torch.float16])
def test_under_fsdp2_the_weights_are_gathered_where_the_ops_read_them(
    one_rank: None, whole_head: bool, compute: torch.dtype | None
) -> None:
    model = build("tiny-qwen3-6h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile(model, loss=8, mlp=8, norms=8, projections=8)
    mesh = init_device_mesh("cpu", (1,))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    if not whole_head:
        fully_shard(model.lm_head, **how)
    fully_shard(model, **how)
    loss, grads = step(model)
    found = (loss, {name: g.full_tensor() for name, g in grads.items()})  # type: ignore[attr-defined]
    if compute is None:
        same(found, wanted)
        return
    assert math.isclose(loss, wanted[0], rel_tol=1e-3)
    for name, grad in wanted[1].items():
        assert found[1][name].dtype == torch.float32
        assert (found[1][name] - grad).norm() <= 2e-2 * grad.norm(), name


def test_a_weight_sharded_inside_a_layer_is_refused_with_what_to_do(one_rank: None) -> None:
    model = build("tiny-qwen2-6h", device="cpu", dtype=torch.float32)
    fully_shard(model.model.layers[0].mlp.up_proj, mesh=init_device_mesh("cpu", (1,)))
    tile(model)
    with pytest.raises(ValueError, match="give FSDP whole layers"):
        step(model)


# LoRA -----------------------------------------------------------------------------------------------------------


def lora(model: PreTrainedModel, **more: object) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False, **more)
    made: nn.Module = peft.get_peft_model(model, config)
    return made


def test_lora_adapters_get_their_gradients_and_frozen_weights_none() -> None:
    model = lora(build("tiny-qwen3-4h", device="cpu", dtype=torch.float32))
    wanted = step(model)  # type: ignore[arg-type]
    tile(model, loss=8, mlp=8, norms=8, projections=8)
    found = step(model)  # type: ignore[arg-type]
    same(found, wanted)
    assert found[1]
    assert all("lora" in name for name in found[1])


def test_dropout_in_an_adapter_is_refused() -> None:
    model = lora(build("tiny-qwen2-4h", device="cpu", dtype=torch.float32), lora_dropout=0.1)
    with pytest.raises(ValueError, match="lora_dropout 0.1"):
        tile(model)


def test_a_plain_linear_is_read_as_it_is() -> None:
    layer = nn.Linear(3, 2)
    found = linear_of(layer, "it")
    assert found.weight is layer.weight
    assert found.kind() == "wb"
