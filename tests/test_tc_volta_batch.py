"""A plain batch needs no mask, also while a whole model is traced; any other batch keeps its mask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import tc_volta
from probes.models.build import build
from probes.text import tokens

MODELS = ["tiny-qwen2-4h", "tiny-qwen3-6h", "tiny-llama-4h"]
IDS = tokens(2, 48, "cpu")


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model compiled whole with tc_volta's attention, and an eager one with the same weights."""
    ours = build(name, device="cpu", dtype=torch.float32, attention=tc_volta.attention_name("flash"))
    stock = build(name, device="cpu", dtype=torch.float32, attention="eager")
    return tc_volta.compile(ours, backend="aot_eager", fullgraph=True), stock


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_batch_a_padded_one_and_a_packed_one_are_right_in_one_compiled_model(name: str) -> None:
    ours, stock = pair(name)
    padding = torch.ones_like(IDS)
    padding[0, :10] = 0
    packed = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, -1)
    plain = stock(input_ids=IDS).logits
    for _ in range(2):
        torch.testing.assert_close(ours(input_ids=IDS).logits, plain, atol=2e-6, rtol=1e-4)
        for more in ({"attention_mask": padding}, {"position_ids": packed}):
            wanted, got = stock(input_ids=IDS, **more).logits, ours(input_ids=IDS, **more).logits
            assert (wanted - plain).abs().max() > 1e-4, "the case must tell the difference"
            kept = slice(10, None) if "attention_mask" in more else slice(None)
            torch.testing.assert_close(got[:, kept], wanted[:, kept], atol=2e-6, rtol=1e-4)


def test_the_compiled_graph_of_a_plain_batch_holds_no_mask() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    ours, _ = pair("tiny-qwen2-4h")
    from tc_volta.batch import noting_plain

    ours._compiled_call_impl = noting_plain(
        ours, torch.compile(ours._call_impl, backend=keep, fullgraph=True)
    )
    for more, masked in (({}, False), ({"attention_mask": torch.ones_like(IDS)}, True)):
        ours(input_ids=IDS, **more)
        calls = [n for n in graphs[-1].graph.nodes if "flash_attn" in str(n.target)]
        assert len(calls) == 2
        assert all((n.args[3] is not None) == masked for n in calls)


class Packing(Qwen2ForCausalLM):
    """Somebody's model that packs inside: its arguments look plain."""

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        positions = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, -1)
        return super().forward(input_ids=input_ids, position_ids=positions, **kwargs)


def tiny(kind: type[PreTrainedModel], config: type[PretrainedConfig], **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(config(**sizes, **heads, **more)).eval()


def both(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a batch that looks plain: eager attention, then compiled whole with ours."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        model.set_attn_implementation(tc_volta.attention_name())
        tc_volta.compile(model, backend="aot_eager")
        return wanted, model(input_ids=IDS).logits


def test_a_model_that_packs_inside_its_own_forward_keeps_its_mask() -> None:
    wanted, got = both(tiny(Packing, Qwen2Config))
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)


def test_a_patched_forward_and_a_pre_hook_keep_their_mask() -> None:
    model = tiny(Qwen2ForCausalLM, Qwen2Config)
    positions = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, -1)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "position_ids": positions}), with_kwargs=True
    )
    wanted, got = both(model)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)


def test_a_sliding_window_is_kept_without_a_mask() -> None:
    model = tiny(
        Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=6, max_window_layers=1
    )
    wanted, got = both(model)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)


def test_chunked_attention_keeps_its_mask() -> None:
    chunks = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16}
    model = tiny(Llama4ForCausalLM, Llama4TextConfig, **chunks)
    wanted, got = both(model)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)
