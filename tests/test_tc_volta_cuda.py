"""tc_volta on a CUDA device: every kernel that serves there against float64, and whole models in one graph."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import tc_volta
from tests.attention_reference import BAR, Inputs, inputs, ours, reference, worst

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KERNELS = tuple(tc_volta.KERNELS)
HALVES = (torch.float16, torch.bfloat16)
TF32 = 2e-3  # CUTLASS may multiply float32 in tensor cores, which keep ten bits


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def serves(given: Inputs, kernel: str, how: dict[str, object]) -> bool:
    mask = how.get("mask")
    assert mask is None or isinstance(mask, Tensor)
    asked = tc_volta.request_of(given.q, given.k, mask, bool(how.get("causal")), int(how.get("window", 0)))  # type: ignore[call-overload]
    return not tc_volta.usable(asked)[kernel]


def needs(kernel: str, given: Inputs) -> None:
    """Skip with the kernel's own reason where this device, or what is installed, cannot run it."""
    asked = tc_volta.request_of(given.q, given.k, None, True, 0)
    if why := tc_volta.usable(asked)[kernel]:
        pytest.skip(why)


def bar(kernel: str, dtype: torch.dtype) -> float:
    fast = dtype == torch.float32 and kernel in ("efficient", "xformers")
    return TF32 if fast else 2 * BAR[dtype]


def checked(kernel: str, given: Inputs, **how: object) -> None:
    """Held against float64 where the kernel serves; refused with a ValueError where it does not."""
    if serves(given, kernel, how):
        error = worst(ours(given, kernel, **how), reference(given, **how))
        assert error < bar(kernel, given.q.dtype), (error, given.q.shape, given.k.shape, how)
        return
    with pytest.raises(ValueError, match=f"kernel '{kernel}' cannot serve"):
        ours(given, kernel, **how)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_outputs_lse_and_gradients_match_float64(kernel: str, dtype: torch.dtype) -> None:
    for heads, dim, seq, causal in itertools.product(
        ((4, 4), (4, 2), (6, 2), (12, 2)), (64, 128), (33, 128, 200), (False, True)
    ):
        checked(kernel, inputs(heads, seq, dim, dtype, device="cuda"), causal=causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masks_windows_and_queries_that_see_nothing(kernel: str, dtype: torch.dtype) -> None:
    given = inputs((6, 2), 77, 64, dtype, device="cuda")
    seen = torch.rand(2, 1, 77, 77, device="cuda") > 0.4
    seen[0, :, 5] = False
    added = torch.randn(1, 6, 77, 77, device="cuda").to(dtype)
    padding = torch.arange(77, device="cuda") < torch.tensor([77, 40], device="cuda")[:, None, None, None]
    for how in (
        {"mask": seen},
        {"mask": added},
        {"mask": padding, "causal": True},
        {"causal": True, "window": 16},
        {"mask": seen, "causal": True, "window": 16},
    ):
        checked(kernel, given, **how)


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_keys_of_another_length(kernel: str) -> None:
    checked(kernel, inputs((4, 2), 65, 64, torch.float16, seq_k=130, device="cuda"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_of_lse_is_right(kernel: str) -> None:
    given = inputs((4, 2), 65, 64, torch.float16, device="cuda")
    needs(kernel, given)
    _, lse = tc_volta.flash_attn(*given[:3], causal=True, kernel=kernel, return_lse=True)
    got = torch.autograd.grad(lse.sum(), given[:2])
    wide = [x.detach().double().requires_grad_() for x in given[:3]]
    _, lse = tc_volta.flash_attn(*wide, causal=True, kernel="math", return_lse=True)
    for g, w in zip(got, torch.autograd.grad(lse.sum(), wide[:2]), strict=True):
        assert (g.double() - w).norm() < 3e-3 * w.norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_broadcast_gradients_and_turned_inputs_are_served(kernel: str) -> None:
    given = inputs((4, 2), 64, 64, torch.float16, device="cuda")
    needs(kernel, given)
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in given[:3]]
    out = tc_volta.flash_attn(*turned, causal=True, kernel=kernel)
    out.sum().backward()
    want = ours(Inputs(*given[:3], torch.ones_like(given.dout)), kernel, causal=True)
    for got, wanted in zip([out, *(x.grad for x in turned)], [want[0], *want[2:]], strict=True):
        assert (got.float() - wanted.float()).norm() <= 2e-3 * wanted.float().norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_opcheck_is_green(kernel: str) -> None:
    given = inputs((4, 2), 33, 64, torch.float16, device="cuda")
    needs(kernel, given)
    args = (*given[:3], None, True, 0.125, 0, kernel)
    torch.library.opcheck(
        torch.ops.tc_volta.flash_attn.default,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_inductor_holds_each_kernel_in_one_graph(kernel: str, dtype: torch.dtype) -> None:
    given = inputs((12, 2), 257, 128, dtype, device="cuda")
    if torch.cuda.get_device_capability() < (8, 0) and dtype == torch.bfloat16:
        pytest.skip("Inductor compiles no bfloat16 below sm_80")
    if kernel != "auto":
        needs(kernel, given)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tc_volta.flash_attn(q * 2, k, v + 1, causal=True, kernel=kernel).transpose(1, 2) * 0.5  # type: ignore[union-attr]

    def both(run: Callable[..., Tensor]) -> list[Tensor]:
        out = run(*given[:3])
        return [out, *torch.autograd.grad(out.float().square().sum(), given[:3])]

    want = both(function)
    for got, wanted in zip(both(torch.compile(function, fullgraph=True)), want, strict=True):
        assert (got.float() - wanted.float()).norm() < 2 * BAR[dtype] * wanted.float().norm()


def test_autocast_takes_mixed_inputs_as_sdpa_does() -> None:
    given = inputs((4, 2), 64, 64, device="cuda")
    with torch.autocast("cuda", torch.float16):
        out, lse = tc_volta.flash_attn(given.q, given.k, given.v.half(), causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    out.float().sum().backward()
    assert given.q.grad.dtype == torch.float32


def test_the_math_kernel_stays_in_float32_under_autocast() -> None:
    given = inputs((4, 2), 64, 64, torch.float16, device="cuda")
    _, want = tc_volta.flash_attn(*given[:3], kernel="math", return_lse=True)
    with torch.autocast("cuda", torch.float16):
        _, lse = tc_volta.flash_attn(*given[:3], kernel="math", return_lse=True)
    assert torch.equal(lse, want)


# ---- models ---------------------------------------------------------------------------------------------------


def model_of(layers: int, kernel: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
    )
    model = Qwen2ForCausalLM(config).cuda().half().train()
    model.set_attn_implementation(tc_volta.attention_name(kernel))
    return model


def step(model: nn.Module) -> list[Tensor]:
    ids = torch.arange(2 * 200, device="cuda").view(2, 200) % 512
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    (loss * 256).backward()  # float16 gradients lie above the smallest float16
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def close(got: list[Tensor], want: list[Tensor]) -> bool:
    """To 5 % of each gradient's norm: both are float16 through every layer."""
    return all(
        (g.float() - w.float()).norm() <= 5e-2 * w.float().norm() for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_28_layers_are_one_graph_under_inductor(checkpointing: bool) -> None:
    model = model_of(28)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    want = step(copy.deepcopy(model))
    tc_volta.compile_layers(model, fullgraph=True)
    assert close(step(model), want)
    record = tc_volta.report(model)
    assert (record.graphs, record.eager) == (1, False), str(record)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "wrapper",
    [tc_volta.compile, tc_volta.compile_layers, tc_volta.compile_mlp_only],
    ids=lambda w: w.__name__,
)
def test_each_wrapper_with_each_kernel_keeps_the_gradients(
    kernel: str, wrapper: Callable[..., nn.Module]
) -> None:
    needs(kernel, inputs((4, 2), 200, 64, torch.float16, device="cuda"))
    model = model_of(2, kernel)
    want = step(copy.deepcopy(model))
    wrapper(model, fullgraph=True)
    assert close(step(model), want)
    assert not tc_volta.report(model).eager, str(tc_volta.report(model))


def test_facts_and_policy_are_of_this_device() -> None:
    facts = tc_volta.device_facts("cuda")
    assert facts.capability == torch.cuda.get_device_capability()
    assert facts.kind == "cuda"
    assert tc_volta.policy("cuda") == tc_volta.policy(facts)
