"""`tile(model)`: a transformers Qwen2, Qwen3 or Llama whose wide intermediates exist one tile at a time.

    tile(model)                                  # the loss, the MLPs, the norms, the projections
    tile(model, loss=2048, mlp=False)            # 2,048 tokens of logits at a time; the MLPs as they were
    untile(model)                                # as before

Each part alone, or together: a norm beside a tiled MLP or tiled projections is taken inside their tiles, and its
module then passes its input on unchanged. Parameters, state_dict and hooks stay as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cp_volta import overlay
from cp_volta.activation import check_activation
from cp_volta.linear import linear_of
from cp_volta.matmul import check_tile
from cp_volta.recompute import recomputing
from cp_volta.tiled_ffn import tiled_mlp
from cp_volta.tiled_head import head_of, tile_loss
from cp_volta.tiled_norm import tiled_rms_norm
from cp_volta.tiled_projections import tiled_qkv

Size = int | bool | None
Attend = Callable[..., tuple[Tensor, Tensor | None]]
FAMILIES = ("Qwen2", "Qwen3", "Llama")


def tile(
    model: nn.Module,
    *,
    loss: Size = True,
    mlp: Size = True,
    norms: Size = True,
    projections: Size = True,
    grad_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Tile parts of a model in place; the same object comes back. Tiling again replaces what was tiled before.

    Each part: True for a tile of the default size, a number of tokens, or False to leave it as it is.
    grad_dtype: in which the head's weight gradient is summed (`tiled_cross_entropy`).
    Raises ValueError, before anything is changed, for what cannot be tiled: another family, another loss,
    quantised projections, an activation that is not known.
    """
    inner = causal_model(model)
    sizes = {"loss": loss, "mlp": mlp, "norms": norms, "projections": projections}
    for part, size in sizes.items():
        check_tile(None if isinstance(size, bool) else size, part)
    layers = _checked(inner, sizes)
    untile(model)
    if loss:
        tile_loss(inner, _size(loss), grad_dtype)
    for layer in layers:
        _tile_layer(layer, mlp, norms, projections)
    if norms:
        _tile_norm(inner.model.norm, norms)  # type: ignore[union-attr, arg-type]
    return model


def untile(model: nn.Module) -> int:
    """Undo `tile`; the number of modules that were changed back."""
    return sum(overlay.remove(module) for module in list(model.modules()))


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers model itself, where peft or torch.compile wraps it.

    Raises ValueError for what is no causal language model of `FAMILIES`.
    """
    model = getattr(model, "_orig_mod", model)
    unwrap = getattr(model, "get_base_model", None)
    inner: nn.Module = unwrap() if callable(unwrap) else model
    name = type(inner).__name__.removeprefix("FSDP")
    if name not in {f"{family}ForCausalLM" for family in FAMILIES}:
        raise ValueError(
            f"{name} cannot be tiled; there are {', '.join(f'{f}ForCausalLM' for f in FAMILIES)}"
        )
    return inner


def _checked(inner: nn.Module, sizes: dict[str, Size]) -> list[nn.Module]:
    """The decoder layers, if all that is asked for can be done."""
    layers = list(inner.model.layers)  # type: ignore[union-attr, arg-type]
    if sizes["loss"]:
        head_of(inner)
    for i, layer in enumerate(layers):
        if sizes["mlp"]:
            check_activation(_activation(layer.mlp))
            for name in ("gate_proj", "up_proj", "down_proj"):
                linear_of(getattr(layer.mlp, name), f"layer {i}: {name}")
        if sizes["projections"]:
            for name in ("q_proj", "k_proj", "v_proj"):
                linear_of(getattr(layer.self_attn, name), f"layer {i}: {name}")
    return layers


def _activation(mlp: nn.Module) -> str:
    name: str = mlp.config.hidden_act  # type: ignore[union-attr, assignment]
    return name


def _size(size: Size) -> int | None:
    return None if isinstance(size, bool) else size


def _tile_layer(layer: nn.Module, mlp: Size, norms: Size, projections: Size) -> None:
    before_attention, before_mlp = layer.input_layernorm, layer.post_attention_layernorm
    for size, user, norm, forward in (
        (projections, layer.self_attn, before_attention, _attention_forward),
        (mlp, layer.mlp, before_mlp, _mlp_forward),
    ):
        if size:
            more = {"eager": _eager(user)} if user is layer.self_attn else {}  # type: ignore[arg-type]
            overlay.put(user, forward, tile=_size(size), norm=norm if norms else None, **more)  # type: ignore[arg-type]
        if size and norms:
            overlay.put(norm, _passed_on)  # type: ignore[arg-type]
        elif norms:
            _tile_norm(norm, norms)  # type: ignore[arg-type]


def _tile_norm(norm: nn.Module, size: Size) -> None:
    overlay.put(norm, _norm_forward, tile=_size(size))


def _norm_forward(norm: nn.Module, hidden_states: Tensor) -> Tensor:
    state = overlay.state_of(norm)
    return tiled_rms_norm(hidden_states, norm.weight, norm.variance_epsilon, tile=state["tile"])  # type: ignore[arg-type]


def _passed_on(norm: nn.Module, hidden_states: Tensor) -> Tensor:
    """What follows this norm normalises, tile by tile."""
    return hidden_states


def _norm_of(state: dict[str, Any]) -> dict[str, Any]:
    norm = state["norm"]
    return {} if norm is None else {"norm_weight": norm.weight, "eps": norm.variance_epsilon}


def _mlp_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    state = overlay.state_of(mlp)
    return tiled_mlp(
        x,
        linear_of(mlp.gate_proj, "gate_proj"),  # type: ignore[arg-type]
        linear_of(mlp.up_proj, "up_proj"),  # type: ignore[arg-type]
        linear_of(mlp.down_proj, "down_proj"),  # type: ignore[arg-type]
        activation=_activation(mlp),
        tile=state["tile"],
        unused=recomputing(),  # it is the last of its layer: a second forward's result goes nowhere
        **_norm_of(state),
    )


def _attention_forward(
    attention: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' own, except that q, k and v come from one op. With a cache it is transformers' own."""
    state = overlay.state_of(attention)
    if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
        return _attention_with_cache(attention, hidden_states, position_embeddings, attention_mask, **kwargs)
    heads = None
    if hasattr(attention, "q_norm"):
        heads = (attention.q_norm.weight, attention.k_norm.weight)  # type: ignore[union-attr]
    q, k, v = tiled_qkv(
        hidden_states,
        linear_of(attention.q_proj, "q_proj"),  # type: ignore[arg-type]
        linear_of(attention.k_proj, "k_proj"),  # type: ignore[arg-type]
        linear_of(attention.v_proj, "v_proj"),  # type: ignore[arg-type]
        *position_embeddings,
        head_norms=heads,  # type: ignore[arg-type]
        tile=state["tile"],
        **{"eps": attention.config.rms_norm_eps, **_norm_of(state)},  # type: ignore[union-attr]
    )
    out, weights = _interface(attention, state["eager"])(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **_window(attention),
        **{name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values")},
    )
    out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
    return attention.o_proj(out), weights  # type: ignore[operator]


def _window(attention: nn.Module) -> dict[str, Any]:
    """Llama has none, and passes none on."""
    return {"sliding_window": attention.sliding_window} if hasattr(attention, "sliding_window") else {}


def _attention_with_cache(
    attention: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    norm = overlay.state_of(attention)["norm"]
    if norm is not None:
        hidden_states = overlay.original(norm)(hidden_states)
    answer: tuple[Tensor, Tensor | None] = overlay.original(attention)(hidden_states, *args, **kwargs)
    return answer


def _interface(attention: nn.Module, eager: Attend) -> Attend:
    """The attention function that the model's configuration names now, as transformers' own forward looks it up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name: str = attention.config._attn_implementation  # type: ignore[union-attr, assignment]
    found: Attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return found


def _eager(attention: nn.Module) -> Attend:
    """transformers' plain attention, of the module that defines this class (or the one that FSDP2 made its own of)."""
    home = next(c.__module__ for c in type(attention).__mro__ if c.__module__.startswith("transformers."))
    found: Attend = importlib.import_module(home).eager_attention_forward
    return found
