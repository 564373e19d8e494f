"""The first module that makes an inf or NaN is named, and nothing of the looking stays behind."""

from __future__ import annotations

import torch
from torch import nn

from cp_volta.overflow import first_nonfinite
from probes.models.build import build


def test_the_innermost_first_module_is_named_with_its_input() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(6e4)
    ids = torch.arange(8)[None]
    found = first_nonfinite(model, lambda: model(input_ids=ids))
    assert found.startswith("model.layers.1.mlp.up_proj: ")
    assert "inf" in found
    assert "in float16; its input was finite, at most" in found


def test_a_finite_model_has_none_and_no_hook_is_left() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert first_nonfinite(model, lambda: model(torch.ones(1, 2))) == ""
    assert not any(m._forward_hooks for m in model.modules())


def test_an_input_that_is_not_finite_is_said_to_be_the_cause() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    found = first_nonfinite(model, lambda: model(torch.tensor([[float("nan"), 1.0]])))
    assert found.endswith("its input was not finite either")
