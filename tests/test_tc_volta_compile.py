"""compile, compile_layers, compile_mlp_only: what compiles, what the report says, and what survives a failure."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
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
from tc_volta import backend as backend_module
from tc_volta.policy import DeviceFacts

V100 = DeviceFacts(kind="cuda", capability=(7, 0), torch="2.10.0", triton="3.6.0", cudnn=91002)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
WRAPPERS = {
    "model": tc_volta.compile,
    "layers": tc_volta.compile_layers,
    "mlp": tc_volta.compile_mlp_only,
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Inductor compiles anew: a cached graph calls no compiler that could fail."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def model_of(family: str = "qwen2", layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    config, kind = FAMILIES[family]
    more = {"head_dim": 16} if family == "qwen3" else {}
    model = kind(config(**SIZES, num_hidden_layers=layers, **more))
    model.set_attn_implementation(tc_volta.attention_name())
    return model.train()


def step(model: nn.Module, seq: int = 33) -> list[torch.Tensor]:
    """[loss, each parameter's gradient] of one step."""
    torch.manual_seed(1)
    ids = torch.randint(0, 128, (2, seq))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", WRAPPERS)
def test_each_wrapper_compiles_one_graph_and_changes_no_number(family: str, what: str) -> None:
    model = model_of(family)
    want = step(copy.deepcopy(model))
    keys = list(model.state_dict())
    assert WRAPPERS[what](model, backend="aot_eager", fullgraph=True) is model
    torch.testing.assert_close(step(model), want)
    record = tc_volta.report(model)
    assert (record.graphs, record.eager, record.graph_breaks) == (1, False, {})
    assert list(model.state_dict()) == keys
    assert model.config.use_cache is False
    assert "use_cache" in {d.name for d in record.decisions}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_28_layers_are_one_graph(checkpointing: bool) -> None:
    model = model_of(layers=28)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    want = step(copy.deepcopy(model))
    tc_volta.compile_layers(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(model), want)
    assert tc_volta.report(model).graphs == 1
    assert tc_volta.report(model).frames_given_up == 0


def test_inductor_gives_the_same_loss_and_gradients() -> None:
    model = model_of(layers=2)
    want = step(copy.deepcopy(model))
    tc_volta.compile_layers(model, fullgraph=True)
    torch.testing.assert_close(step(model), want, rtol=1e-4, atol=1e-5)
    record = tc_volta.report(model)
    assert (record.graphs, record.eager) == (1, False)


@pytest.mark.usefixtures("no_caches")
def test_options_and_modes_travel_for_one_model_and_no_flag_is_flipped() -> None:
    import torch._inductor.config as inductor

    before = (inductor.get_config_copy(), torch._dynamo.config.get_config_copy())
    seen = {}

    def look(graph: torch.fx.GraphModule, inputs: object, **_: object) -> object:
        seen.update(max_autotune=inductor.max_autotune, epilogue=inductor.epilogue_fusion)
        raise RuntimeError("seen enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx_inner", look)
        model = nn.Linear(4, 4)
        tc_volta.compile(model, mode="max-autotune-no-cudagraphs", options={"epilogue_fusion": False})
        model(torch.ones(2, 4))
    assert seen == {"max_autotune": True, "epilogue": False}
    assert (inductor.get_config_copy(), torch._dynamo.config.get_config_copy()) == before


@pytest.mark.usefixtures("no_caches")
def test_a_failing_inductor_runs_that_graph_eagerly_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    model = model_of()
    want = step(copy.deepcopy(model))
    tc_volta.compile_layers(model)
    torch.testing.assert_close(step(model), want)
    record = tc_volta.report(model)
    assert record.graphs == 0
    assert record.eager
    assert any("PassManager::run failed" in why for why in record.fallbacks)
    assert "runs eagerly" in str(record)


def test_one_failure_does_not_stop_later_modules_from_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "_through", lambda *_: 1 / 0)
        bad = nn.Linear(4, 4)
        tc_volta.compile(bad)
        bad(torch.ones(2, 4))
    assert tc_volta.report(bad).fallbacks == ["ZeroDivisionError: division by zero"]
    for size in range(5, 12):
        good = nn.Linear(size, size)
        tc_volta.compile(good, backend="eager", dynamic=None)
        good(torch.ones(2, size))
        assert tc_volta.report(good).graphs == 1, size


@pytest.mark.usefixtures("no_caches")
def test_a_backward_that_inductor_cannot_compile_runs_eagerly_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx

    whole = compile_fx.compile_fx_inner

    def backward_fails(graph: torch.fx.GraphModule, inputs: object, **how: object) -> object:
        if how.get("is_backward"):
            output = next(node for node in graph.graph.nodes if node.op == "output")
            output.args = (tuple(None for _ in output.args[0]),)
            graph.recompile()  # fails half-way, with the graph rewritten
            raise RuntimeError("no such layout")
        return whole(graph, inputs, **how)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", backward_fails)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    want = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    tc_volta.compile(model)
    got = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(got, want)
    record = tc_volta.report(model)
    assert record.graphs == 1
    assert record.fallbacks == ["backward: RuntimeError: no such layout"]


def test_modules_of_torch_itself_are_compiled_too_and_share_a_graph() -> None:
    model = Stack()
    x = torch.randn(3, 4, requires_grad=True)
    want = model(x)
    tc_volta.compile_mlp_only(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(x), want)
    assert tc_volta.report(model).graphs == 1  # plain Module.compile: none, without a word


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() for _ in range(12)])
        for layer in self.layers:
            layer.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.mlp(x)
        return x


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        print(end="")
        return y * 2


def test_graph_breaks_are_reported_with_their_reason_and_graphs_counted() -> None:
    model = Printing()
    tc_volta.compile(model, backend="eager")
    model(torch.ones(2, 4))
    record = tc_volta.report(model)
    assert record.graphs == 2
    assert [n for why, n in record.graph_breaks.items() if "print" in why] == [1]
    assert not record.eager
    assert "graph break (1x)" in str(record)


def test_frames_that_dynamo_gives_up_are_counted_apart_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    tc_volta.compile(model, backend="eager")
    for batch in range(1, 12):
        model(torch.ones(batch, 4))
    record = tc_volta.report(model)
    assert record.graphs == 8
    assert record.frames_given_up >= 1
    assert any("recompile" in why for why in record.given_up)
    assert record.fallbacks == []
    assert record.eager


def test_compiling_again_replaces() -> None:
    model = model_of()
    tc_volta.compile_layers(model, backend="eager")
    tc_volta.compile_mlp_only(model, backend="eager", fullgraph=True)
    step(model)
    record = tc_volta.report(model)
    assert record.asked == "mlp, mode default"
    assert record.graphs == 1


def test_a_v100_takes_no_cudagraphs_and_no_triton_gemm_and_says_so() -> None:
    model = nn.Linear(4, 4)
    record = tc_volta.report(tc_volta.compile(model, mode="reduce-overhead", device=V100))
    assert record.options["triton.cudagraphs"] is False
    assert "less what the policy turns off: triton.cudagraphs = False" in str(record)
    record = tc_volta.report(tc_volta.compile(model, options={"max_autotune": True}, device=V100))
    assert record.options["max_autotune_gemm_backends"] == "ATEN"
    forced = {"triton.cudagraphs": True}
    record = tc_volta.report(tc_volta.compile(model, options=forced, device=V100))
    assert record.options["triton.cudagraphs"] is True
    assert "against the policy" in str(record)


def test_bf16_on_a_v100_is_refused_with_the_reason_and_nothing_is_changed() -> None:
    model = model_of().bfloat16()
    for wrapper in WRAPPERS.values():
        with pytest.raises(ValueError, match="sm_70 has no bfloat16 arithmetic"):
            wrapper(model, device=V100)
    assert model.config.use_cache is True
    with pytest.raises(KeyError, match="Qwen2ForCausalLM was not compiled"):
        tc_volta.report(model)


def refusals() -> dict[str, Callable[[], object]]:
    return {
        "unknown mode 'max-autotun'; did you mean 'max-autotune'": lambda: tc_volta.compile(
            nn.Linear(2, 2), mode="max-autotun"
        ),
        "unknown backend 'inducto'; did you mean 'inductor'": lambda: tc_volta.compile(
            nn.Linear(2, 2), backend="inducto"
        ),
        "unknown Inductor option 'suppress_errors'": lambda: tc_volta.compile(
            nn.Linear(2, 2), options={"suppress_errors": True}
        ),
        "looked for `layers` and `model.layers`": lambda: tc_volta.compile_layers(nn.Linear(2, 2)),
        "Linear has no module `mlp`": lambda: tc_volta.compile_mlp_only(WithLayers()),
    }


class WithLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize("message", refusals())
def test_what_a_user_can_mend_raises(message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        refusals()[message]()


def test_the_backbone_alone_has_layers_too() -> None:
    assert len(tc_volta.decoder_layers(model_of().model)) == 3


def test_importing_changes_nothing() -> None:
    code = """
import torch, torch._inductor.config as inductor, torch._dynamo.config as dynamo
import torch.nn.functional as F
before = (inductor.get_config_copy(), dynamo.get_config_copy(), F.scaled_dot_product_attention)
import sys
already = set(sys.modules)
import tc_volta
assert (inductor.get_config_copy(), dynamo.get_config_copy(), F.scaled_dot_product_attention) == before
assert not torch.cuda.is_initialized()
assert not {"transformers", "xformers", "harness", "probes"} & (set(sys.modules) - already), "imported early"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
