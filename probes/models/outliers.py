"""Weights that make a random Qwen2 reach what trained checkpoints reach.

Two things in trained checkpoints are beyond random weights by orders of magnitude, and both are what fp16 fails at:

- massive activations: an early layer's MLP writes thousands, beyond 1e4, into a few channels of the residual stream,
  and they stay to the end. Source: Sun et al. 2024, arXiv:2402.17762.
- large biases of queries and keys: products before scaling pass 65,504. Qwen2.5-7B's logits are NaN in fp16 with
  attention written out, and finite with kernels that keep scores in float32.

Not imitated: in trained checkpoints few tokens (the first, delimiters) carry them; here every token does.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from transformers import PreTrainedModel

CHANNELS = 4  # of the residual stream
RESIDUAL_RMS = 6_000.0  # of those channels; over a few hundred tokens the largest is about three times that
_GATE_RMS = 6.0  # of gate and up projections, where SiLU is nearly a ramp
_BIAS = 300.0  # of one query and one key component per head: a product of 90,000


@torch.no_grad()
def plant(model: PreTrainedModel) -> None:
    """Scale one early layer's norm gain and rows of its down projection, and bias its queries and keys, in place.

    model: of the Qwen2 family (it has biases), random weights as transformers initialises them. The planted layer
    is number layers // 8, so the first one of a tiny model. Draws no random numbers.
    """
    config = model.config
    layer = cast(Any, model).model.layers[config.num_hidden_layers // 8]
    std = config.initializer_range
    gain = _GATE_RMS / (std * math.sqrt(config.hidden_size))
    layer.post_attention_layernorm.weight.fill_(gain)
    # RMS of silu(gate) * up: half of the gates are cut off.
    product = math.sqrt(0.5) * _GATE_RMS**2
    row = RESIDUAL_RMS / (product * math.sqrt(config.intermediate_size))
    step = config.hidden_size // CHANNELS
    layer.mlp.down_proj.weight[::step].mul_(row / std)
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        # The last component of a head turns slowest under RoPE: the product hardly depends on the distance,
        # so softmax, which ignores a constant, still attends to more than one key.
        projection.bias[layer.self_attn.head_dim - 1 :: layer.self_attn.head_dim] = _BIAS
