"""How models reach the op: through transformers' interfaces, with their masks, and under F.scaled_dot_product_attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tc_volta

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
NAMES = ("auto", "math", "flash")


@pytest.fixture(autouse=True)
def _sdpa_is_given_back() -> Iterator[None]:
    before = F.scaled_dot_product_attention
    yield
    assert F.scaled_dot_product_attention is before
    torch._dynamo.reset()


def model_of(family: str = "qwen2", **more: object) -> nn.Module:
    config, kind = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    torch.manual_seed(0)
    return kind(config(**SIZES, **({"head_dim": 16} if family == "qwen3" else {}), **more))


def logits(model: nn.Module, name: str, **batch: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model(use_cache=False, **batch).logits


def padded() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, 13:] = 0  # to the right
    mask[2, :6] = 0  # and to the left: the first queries see no key
    return {"input_ids": torch.randint(0, 128, (3, 21)), "attention_mask": mask}


def packed() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(9), torch.arange(5), torch.arange(7)])[None]
    return {"input_ids": torch.randint(0, 128, (1, 21)), "position_ids": positions}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("kernel", NAMES)
def test_a_padded_batch_gives_what_stock_sdpa_gives(family: str, kernel: str) -> None:
    model, batch = model_of(family), padded()
    want = logits(model, "sdpa", **batch)
    got = logits(model, tc_volta.attention_name(kernel), **batch)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real])
    assert not torch.allclose(got[real], logits(model, "sdpa", input_ids=batch["input_ids"])[real])


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
@pytest.mark.parametrize("kernel", NAMES)
def test_packed_documents_do_not_see_each_other(stock: str, kernel: str) -> None:
    model, batch = model_of(), packed()
    got = logits(model, tc_volta.attention_name(kernel), **batch)
    torch.testing.assert_close(got, logits(model, stock, **batch))
    second = model(input_ids=batch["input_ids"][:, 9:14], use_cache=False).logits
    torch.testing.assert_close(got[:, 9:14], second)


@pytest.mark.parametrize("kernel", NAMES)
def test_a_sliding_window_is_kept(kernel: str) -> None:
    model = model_of(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    ids = padded()["input_ids"]
    got = logits(model, tc_volta.attention_name(kernel), input_ids=ids)
    torch.testing.assert_close(got, logits(model, "eager", input_ids=ids))
    whole = logits(model_of(), "eager", input_ids=ids)
    assert not torch.allclose(got, whole)


def test_a_window_without_a_mask_is_kept_too() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[tc_volta.attention_name()]
    q, k = torch.randn(1, 4, 12, 16), torch.randn(1, 2, 12, 16)
    module = nn.Module()
    got, _ = attend(module, q, k, k, None, scaling=0.25, sliding_window=5)
    want = tc_volta.flash_attn(q, k, k, causal=True, scale=0.25, window=5)
    assert torch.equal(got, want.transpose(1, 2))


def test_generation_with_a_cache_gives_the_same_tokens() -> None:
    model = model_of().eval()
    ids = padded()["input_ids"][:1]
    tokens = []
    for name in ("sdpa", tc_volta.attention_name()):
        model.set_attn_implementation(name)
        tokens.append(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)


def test_gradients_equal_stock_sdpas() -> None:
    model, batch = model_of(), padded()
    labels = batch["input_ids"].masked_fill(~batch["attention_mask"].bool(), -100)
    grads = []
    for name in ("sdpa", tc_volta.attention_name()):
        one = copy.deepcopy(model)
        one.set_attn_implementation(name)
        one(**batch, labels=labels, use_cache=False).loss.backward()
        grads.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*grads)


def test_dropout_and_what_else_is_unknown_raises() -> None:
    model = model_of(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match="dropout is 0.1"):
        logits(model, tc_volta.attention_name(), **padded())
    with pytest.raises(ValueError, match="unknown kernel 'fast'; there are auto, flash"):
        tc_volta.attention_name("fast")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[tc_volta.attention_name()]
    with pytest.raises(ValueError, match="softcap is given"):
        attend(nn.Module(), *[torch.randn(1, 2, 4, 8)] * 3, None, softcap=30.0)


def test_a_forced_kernel_that_cannot_serve_stops_the_model() -> None:
    with pytest.raises(ValueError, match="kernel 'efficient' cannot serve this call"):
        logits(model_of(), tc_volta.attention_name("efficient"), **padded())


def test_each_kernel_has_a_name_that_transformers_takes_for_no_package_of_its_own() -> None:
    names = [tc_volta.attention_name(kernel) for kernel in ("auto", *tc_volta.KERNELS)]
    assert names == [
        "tc_volta",
        "tc_volta_fa",
        "tc_volta_cudnn",
        "tc_volta_efficient",
        "tc_volta_xformers",
        "tc_volta_math",
    ]
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert all(name in ALL_ATTENTION_FUNCTIONS and name in ALL_MASK_ATTENTION_FUNCTIONS for name in names)


# ---- F.scaled_dot_product_attention ---------------------------------------------------------------------------


def qkv(grouped: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(1, heads, 12, 16) for heads in (4, 2 if grouped else 4, 2 if grouped else 4)]


def targets(function: object, *args: object, **kwargs: object) -> list[str]:
    """The ops of the one graph that a function traces to."""
    names: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(function, backend=look, fullgraph=True)(*args, **kwargs)  # type: ignore[call-overload]
    return names


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_routing_is_opt_in_serves_the_same_numbers_and_can_be_undone() -> None:
    stock = F.scaled_dot_product_attention
    want = attend(*qkv(grouped=True))
    handle = tc_volta.register_flash_attn_volta("math")
    assert F.scaled_dot_product_attention is not stock
    torch.testing.assert_close(attend(*qkv(grouped=True)), want)
    handle.undo()
    handle.undo()
    assert F.scaled_dot_product_attention is stock


def test_a_compiled_graph_holds_the_op_only_while_routed() -> None:
    assert not any("tc_volta" in name for name in targets(attend, *qkv()))
    with tc_volta.register_flash_attn_volta():
        names = targets(attend, *qkv())
    assert any("tc_volta.flash_attn" in name for name in names)
    torch._dynamo.reset()
    assert not any("tc_volta" in name for name in targets(attend, *qkv()))


def test_a_function_compiled_before_is_compiled_anew_for_the_routing() -> None:
    seen = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(any("tc_volta" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(attend, backend=look)
    compiled(*qkv())
    with tc_volta.register_flash_attn_volta():
        compiled(*qkv())
    compiled(*qkv())
    assert seen == [False, True]


def test_routings_nest_and_may_end_in_any_order() -> None:
    stock = F.scaled_dot_product_attention
    outer = tc_volta.register_flash_attn_volta("math")
    inner = tc_volta.register_flash_attn_volta("flash")
    outer.undo()
    assert F.scaled_dot_product_attention is inner._function
    inner.undo()
    assert F.scaled_dot_product_attention is stock


def test_a_patch_that_another_library_laid_over_ours_survives_the_undo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = F.scaled_dot_product_attention
    handle = tc_volta.register_flash_attn_volta("efficient")  # which raises on a CPU while it is active
    ours = F.scaled_dot_product_attention

    def theirs(*args: object, **kwargs: object) -> object:
        return ours(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    handle.undo()
    assert F.scaled_dot_product_attention is theirs
    assert F.scaled_dot_product_attention(*qkv()).shape == (1, 4, 12, 16)
    F.scaled_dot_product_attention = stock


def test_calls_that_the_op_does_not_offer_go_to_torch_and_are_counted() -> None:
    q, k, v = qkv()
    with tc_volta.register_flash_attn_volta() as routing:
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        F.scaled_dot_product_attention(q[0], k[0], v[0])
        F.scaled_dot_product_attention(q[:, :, :5], k, v, is_causal=True)
        F.scaled_dot_product_attention(q, k, v[..., :8])
        F.scaled_dot_product_attention(q, k, v, torch.zeros(12, 12, requires_grad=True))
        F.scaled_dot_product_attention(q, k, v)
    assert routing.passed_on == {
        "dropout": 1,
        "3 dimensions": 1,
        "causal with S != T": 1,
        "head dims of K and V differ": 1,
        "a gradient of the mask": 1,
    }


def test_a_forced_kernel_that_cannot_serve_raises_at_the_call() -> None:
    with tc_volta.register_flash_attn_volta("efficient"), pytest.raises(ValueError, match="is for CUDA"):
        F.scaled_dot_product_attention(*qkv())
    with pytest.raises(ValueError, match="unknown kernel 'fast'"):
        tc_volta.register_flash_attn_volta("fast")


def test_a_stock_transformers_model_runs_through_the_op_when_routed() -> None:
    model, batch = model_of(), padded()
    want = logits(model, "sdpa", **batch)
    calls = []
    with tc_volta.register_flash_attn_volta() as routing:
        with torch.profiler.profile() as profile:
            got = logits(model, "sdpa", **batch)
        calls = [event.name for event in profile.events() if event.name == "tc_volta::flash_attn"]
        assert routing.passed_on == {}
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real])
    assert len(calls) == SIZES["num_hidden_layers"]
