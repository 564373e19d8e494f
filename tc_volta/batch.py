"""Whether a batch is plain: causal and nothing else, no padding, no packing, no cache.

While Dynamo traces a whole model, transformers cannot read a mask's values, so it builds the [B, 1, S, S] mask of
every batch, and the attention kernels that take no mask, or are slow with one, are lost: measured on an H200 at 8,192
tokens, the efficient kernel fell from 21,600 (layers compiled) to 13,300 tokens/s, and FlashAttention refused. What
arguments a call has is known before tracing; it is noted here, and Dynamo guards on it.

A mask left out by mistake is a wrong model in silence. So a batch is plain only where all is known: one of
transformers' own models, its forward unchanged, and no argument but those below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Arguments of a transformers model that say nothing of who may look at whom.
_SAY_NOTHING = frozenset(
    (
        "input_ids",
        "inputs_embeds",
        "labels",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    )
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
        _Now.plain = _stock(model) and all(
            name in _SAY_NOTHING for name, value in given.items() if value is not None
        )
        try:
            return call(*args, **kwargs)
        finally:
            _Now.plain = before

    return noted


def _stock(model: nn.Module) -> bool:
    """Whether the forward is transformers' own: another may pack, or mask, inside.

    Chunked attention hides keys by a mask alone; a sliding window is also told to the attention function.
    """
    return (
        type(model).__module__.startswith("transformers.")
        and "forward" not in vars(model)
        and not model._forward_pre_hooks
        and not getattr(getattr(model, "config", None), "attention_chunk_size", None)
    )


def mask_unless_plain(build: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A mask function for transformers: None for a plain batch, so that causality is left to the kernel.

    build: transformers' own. A sliding window needs no mask either: the op takes it as an argument. A model's own
    addition to the mask (transformers then asks for vmap) and a bidirectional mask are always built.
    """

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        causal = not kwargs.get("use_vmap") and "allow_is_bidirectional_skip" not in kwargs
        return None if _Now.plain and causal else build(*args, **kwargs)

    return mask
