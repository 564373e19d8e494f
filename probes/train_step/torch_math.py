"""transformers' sdpa held to torch's math kernel: the baseline that everything is a ratio to.

Torch's own, not tc_volta's formulas: it is what a user gets on a card, or for a call, that no fused kernel serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_NAME = "sdpa_math"


def attention_name() -> str:
    """The name to give transformers, registered on first use, with sdpa's masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return _NAME


def _attend(module: torch.nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """In here, and not around the step: a checkpointed layer is recomputed outside any context of the forward."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with sdpa_kernel(SDPBackend.MATH):
        out, _ = sdpa_attention_forward(module, *tensors, **options)
    return out, None
