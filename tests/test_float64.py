"""The reference is float64 throughout, and says so if not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from probes.float64 import NarrowOperation, float64_everywhere
from probes.models.build import build
from probes.text import tokens
from probes.train_step.training import checkpoint_layers

MODELS = ["tiny-qwen2-4h", "tiny-qwen3-6h", "tiny-llama-4h"]


def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    return build(name, device="cpu", dtype=torch.float64, attention=attention)


def loss_of(model: PreTrainedModel) -> Tensor:
    ids = tokens(2, 32, "cpu")
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def quotient(model: PreTrainedModel, weight: Tensor, direction: Tensor, step: float = 1e-4) -> float:
    """Slope of the loss along `direction`, from four points around the weight; error of order step**4."""
    values = {}
    with torch.no_grad():
        for k in (-2, -1, 1, 2):
            weight += k * step * direction
            values[k] = float(loss_of(model))
            weight -= k * step * direction
    return (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * step)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_model_runs_in_float64_alone(name: str, attention: str) -> None:
    model = model_of(name, attention)
    with float64_everywhere():
        loss = loss_of(model)
        loss.backward()
    assert loss.dtype == torch.float64
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())


def test_recomputed_activations_are_float64_too() -> None:
    model = model_of("tiny-qwen3-4h")
    with float64_everywhere():
        plain = gradients(model)
        checkpoint_layers(model)
        again = gradients(model)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_difference_quotients(name: str) -> None:
    model = model_of(name)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm"):
        weight = model.model.layers[0].get_submodule(part).weight
        direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with float64_everywhere():
            slope = float((gradients(model)[f"model.layers.0.{part}.weight"] * direction).sum())
            assert slope == pytest.approx(quotient(model, weight, direction), rel=1e-6), part


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_double_model_is_off_by_about_a_float32_rounding(name: str) -> None:
    model = model_of(name)
    plain = gradients(model)
    with float64_everywhere():
        exact = gradients(model)
    errors = [float((plain[n] - exact[n]).norm() / exact[n].norm()) for n in exact]
    assert 1e-8 < max(errors) < 1e-5


ASKS = {
    "float()": lambda x: x.float(),
    "to(float32)": lambda x: x.to(torch.float32),
    "to(device, float32)": lambda x: x.to("cpu", torch.float32),
    "to(dtype=float32)": lambda x: x.to(dtype=torch.float32),
    "type(float32)": lambda x: x.type(torch.float32),
    "softmax(dtype)": lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
    "sum(dtype)": lambda x: x.sum(dtype=torch.float32),
    "arange(dtype)": lambda x: torch.arange(4, dtype=torch.float32),
    "zeros_like(dtype)": lambda x: torch.zeros_like(x, dtype=torch.float32),
    "new_ones(dtype)": lambda x: x.new_ones(3, dtype=torch.float32),
    "ones without a dtype": lambda x: torch.ones(3),
    "tensor of a float": lambda x: torch.tensor(0.5),
    "an integer divided": lambda x: torch.arange(4) / 3,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_request_for_float32_gives_float64(ask: object) -> None:
    x = torch.rand(4, dtype=torch.float64)
    with float64_everywhere():
        assert ask(x).dtype == torch.float64  # type: ignore[operator]
    assert torch.ones(1).dtype == torch.float32


NARROW = {
    "aten.ones.default": lambda w: torch.ones(2, dtype=torch.float16),
    "aten.bmm.default": lambda w: w[None] @ w[None],
    "aten.lt.Scalar": lambda w: w < 0.5,
    "aten._foreach_add_.Scalar": lambda w: torch._foreach_add_([w], 1.0),
    "aten.view_as_complex.default": lambda w: torch.view_as_complex(w),
}


@pytest.mark.parametrize(("operation", "narrow"), NARROW.items(), ids=NARROW)
def test_a_narrower_operation_is_named(operation: str, narrow: object) -> None:
    weight = torch.rand(2, 2)
    with pytest.raises(NarrowOperation, match=operation), float64_everywhere():
        narrow(weight)  # type: ignore[operator]
    assert torch.get_default_dtype() == torch.float32


def test_widening_is_no_narrow_operation() -> None:
    weight = torch.rand(2, 2)
    with float64_everywhere():
        assert (weight.double() + weight * torch.ones(2, 2)).dtype == torch.float64


def test_an_error_of_the_body_is_its_own() -> None:
    with pytest.raises(KeyError), float64_everywhere():
        {}[torch.ones(2, dtype=torch.float16)]
    assert torch.get_default_dtype() == torch.float32
