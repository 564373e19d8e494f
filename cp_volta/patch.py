"""A transformers model on a shard of the sequence: its attention reaches over all ranks of a group.

The model runs as it is on the tokens that its rank holds; only attention looks further. What would make that wrong
in silence (rotary positions counted from zero, a padding mask, labels shifted after sharding, a cache) is refused,
or put right, before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cp_volta.attention import attend
from cp_volta.group import CpGroup, init_cp_group
from cp_volta.heads import Heads
from tc_volta.errors import Unsupported

MODES = ("ulysses", "ring", "hybrid")
_STATE = "_cp_volta_patch"


class _Patch:
    """What `unpatch` undoes."""

    def __init__(self, attention: str, use_cache: Any, hooks: list[RemovableHandle]) -> None:
        self.attention, self.use_cache, self.hooks = attention, use_cache, hooks


def patch_for_cp(
    model: nn.Module, cp_group: CpGroup | None = None, mode: str | None = None, *, kernel: str = "auto"
) -> nn.Module:
    """Let the model's attention work over the ranks of `cp_group`, in place; returns the model.

    Feed it `shard_batch`'s shards. mode: "ulysses", "ring" or "hybrid"; None takes what the group is made for, and
    without a group all ranks become one (ulysses, or a ring). kernel: of tc_volta's table.
    Raises ValueError for a mode that the group is not made for, head counts that can't be dealt out, a model patched
    already; Unsupported for attention that can't be honoured over several ranks.
    """
    if is_patched(model):
        raise ValueError(f"{type(model).__name__} is patched already; unpatch it first")
    cp = _group(cp_group, mode)
    _check(model, cp)
    config: Any = model.config
    patch = _Patch(config._attn_implementation, config.use_cache, [])
    model.set_attn_implementation(_name(cp, kernel))  # type: ignore[operator]
    config.use_cache = False
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    patch.hooks = [
        model.register_forward_pre_hook(_before_loss, with_kwargs=True),
        decoder.register_forward_pre_hook(_before_layers(cp), with_kwargs=True),
    ]
    setattr(model, _STATE, patch)
    return model


def is_patched(model: nn.Module) -> bool:
    """Did `patch_for_cp` change this model?"""
    return hasattr(model, _STATE)


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch_for_cp`. Raises ValueError for a model that is not patched."""
    patch: _Patch | None = getattr(model, _STATE, None)
    if patch is None:
        raise ValueError(f"{type(model).__name__} is not patched")
    for hook in patch.hooks:
        hook.remove()
    model.set_attn_implementation(patch.attention)  # type: ignore[operator]
    model.config.use_cache = patch.use_cache  # type: ignore[union-attr]
    delattr(model, _STATE)
    return model


def _of_type(kind: str) -> Callable[..., nn.Module]:
    def patch(
        model: nn.Module, cp_group: CpGroup | None = None, mode: str | None = None, *, kernel: str = "auto"
    ) -> nn.Module:
        found = getattr(getattr(model, "config", None), "model_type", None)
        if found != kind:
            raise ValueError(f"patch_{kind} takes a {kind} model; this is {found or type(model).__name__}")
        return patch_for_cp(model, cp_group, mode, kernel=kernel)

    patch.__doc__ = f"`patch_for_cp` for a {kind} model. Raises ValueError for any other."
    return patch


patch_qwen2, patch_qwen3, patch_llama = _of_type("qwen2"), _of_type("qwen3"), _of_type("llama")


def _group(cp: CpGroup | None, mode: str | None) -> CpGroup:
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode {mode!r} is none; there are {', '.join(MODES)}")
    if cp is None:
        if mode == "hybrid":
            raise ValueError("mode 'hybrid' needs a group: init_cp_group(cp_size, ulysses=…)")
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
        return init_cp_group(ulysses=size if mode == "ulysses" else 1)
    made_for = "hybrid" if cp.ring > 1 and cp.ulysses > 1 else "ulysses" if cp.ulysses > 1 else "ring"
    if mode not in (None, made_for) and cp.size > 1:
        raise ValueError(f"mode {mode!r}, but the group is ring {cp.ring} x ulysses {cp.ulysses}: {made_for}")
    return cp


def _check(model: nn.Module, cp: CpGroup) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "get_decoder"):
        raise ValueError(
            f"{type(model).__name__} is no transformers decoder: use RingAttention or UlyssesAttention"
        )
    Heads(config.num_attention_heads, config.num_key_value_heads, cp.ulysses)
    for name in ("attention_dropout", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None):
            raise Unsupported(f"{name} is {getattr(config, name)}: not honoured over several ranks; unset it")


_patched: list[tuple[CpGroup, str]] = []


def _name(cp: CpGroup, kernel: str) -> str:
    """The transformers name of attention over this group, registered on first use, in both tables."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if (cp, kernel) not in _patched:
        _patched.append((cp, kernel))
        name = f"cp_volta_{len(_patched)}"
        AttentionInterface.register(name, _attention(cp, kernel))
        AttentionMaskInterface.register(name, _no_mask)
    return f"cp_volta_{_patched.index((cp, kernel)) + 1}"


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality and windows are the kernel's, documents an argument; a mask of the model's own can't be sharded."""
    if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
        raise Unsupported("the model adds a mask of its own, which attention over several ranks can't honour")


def _attention(cp: CpGroup, kernel: str) -> Callable[..., tuple[Tensor, None]]:
    def over_ranks(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        documents: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """[B, H, s, D] queries and compact [B, G, s, D] keys in; [B, s, H, D] out, as transformers expects."""
        refused = {"dropout": dropout or None, "attention_mask": attention_mask}
        refused |= {name: others.get(name) for name in ("softcap", "s_aux", "position_bias")}
        for name, given in refused.items():
            if given is not None:
                raise Unsupported(f"{name} is given; attention over several ranks does not honour it")
        out = attend(
            query,
            key,
            value,
            cp,
            causal=getattr(module, "is_causal", True),
            scale=scaling,
            window=sliding_window,
            documents=documents,
            kernel=kernel,
        )
        return out.transpose(1, 2), None

    return over_ranks


def _before_loss(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is None:
        return
    for needed in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(needed) is None:
            raise Unsupported(
                f"labels without {needed}: a shard would lose the label at its border, or its weight in the mean. "
                "Take shard_batch and cp_loss, or give labels, shift_labels and num_items_in_batch"
            )


def _before_layers(cp: CpGroup) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    def complete(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Refuse what can't be honoured; give this rank's positions where none came."""
        for name in ("attention_mask", "cache", "past_key_values"):
            if kwargs.get(name) is not None:
                raise Unsupported(
                    f"{name} is given: a rank sees its own shard alone. shard_batch turns padding at the end into "
                    "ignored labels; packed documents go in as documents"
                )
        tokens = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
        tokens = args[0] if tokens is None else tokens
        held = cp.positions(tokens.shape[1] * cp.size).to(tokens.device)
        given = kwargs.get("position_ids")
        if given is None:
            kwargs["position_ids"] = held.unsqueeze(0)
        elif kwargs.get("documents") is None:
            message = (
                "position_ids are not those of this rank's tokens; for packed documents give documents too"
            )
            same = (given == held).all()
            if torch.compiler.is_compiling():
                torch._assert_async(same, message)
            elif not same:
                raise Unsupported(message)
        return args, kwargs

    return complete
