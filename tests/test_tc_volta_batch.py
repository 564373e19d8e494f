"""A plain batch needs no mask, also while a whole model is traced; any other batch keeps its mask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

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
