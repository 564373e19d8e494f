"""Whether a batch is plain: causal and nothing else, no padding, no packing, no cache.

While Dynamo traces a whole model, transformers cannot read a mask's values, so it builds the [B, 1, S, S] mask of
every batch, and the attention kernels that take no mask, or are slow with one, are lost: measured on an H200 at 8,192
tokens, the efficient kernel fell from 21,600 (layers compiled) to 13,300 tokens/s, and FlashAttention refused. What
arguments a call has is known before tracing; it is noted here, and Dynamo guards on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Arguments of a transformers model that make a batch something else than plain.
_NOT_PLAIN = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seqlens",
)


class _Now:
    plain = False  # of the call that is running, through `noting_plain`


def noting_plain(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a way into the model's forward, with the batch's plainness noted while it runs."""
    signature = inspect.signature(model.forward)

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        before = _Now.plain
        _Now.plain = all(given.get(name) is None for name in _NOT_PLAIN)
        try:
            return call(*args, **kwargs)
        finally:
            _Now.plain = before

    return noted


def mask_unless_plain(build: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A mask function for transformers: None for a plain batch, so that causality is left to the kernel.

    build: transformers' own. A sliding window needs no mask either: the op takes it as an argument.
    """

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _Now.plain else build(*args, **kwargs)

    return mask
