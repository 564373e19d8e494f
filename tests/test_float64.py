"""The reference is float64 throughout, and says so if not."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from probes.float64 import NarrowOperation, float64_everywhere
from probes.models.build import build
from probes.text import tokens

MODELS = ["tiny-qwen2-4h", "tiny-qwen3-6h", "tiny-llama-4h"]


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    ids = tokens(2, 32, "cpu")
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def model_of(name: str) -> PreTrainedModel:
    return build(name, device="cpu", dtype=torch.float64, attention="eager")


@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_model_runs_in_float64_alone(name: str) -> None:
    model = model_of(name)
    with float64_everywhere():
        loss = loss_of(model)
        loss.backward()
    assert loss.dtype == torch.float64
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())


def test_its_gradient_agrees_with_a_difference_quotient_where_a_plain_double_model_does_not() -> None:
    model = model_of("tiny-qwen2-4h")
    weight = model.model.layers[0].mlp.down_proj.weight
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def slope_of_gradient() -> float:
        model.zero_grad()
        loss_of(model).backward()
        return float((weight.grad * direction).sum())

    with float64_everywhere():
        ours = slope_of_gradient()
        step = 1e-4
        sides = []
        with torch.no_grad():
            for sign in (1, -1):
                weight += sign * step * direction
                sides.append(float(loss_of(model)))
                weight -= sign * step * direction
        quotient = (sides[0] - sides[1]) / (2 * step)
    plain = slope_of_gradient()
    assert ours == pytest.approx(quotient, rel=1e-6)
    assert abs(plain - ours) / abs(ours) > 1e-9, "a plain double model is expected to lose digits here"


def test_a_narrower_operation_is_named() -> None:
    with pytest.raises(NarrowOperation, match="aten.ones"), float64_everywhere():
        torch.ones(2, dtype=torch.float16)
