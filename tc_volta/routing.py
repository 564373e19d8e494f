"""How models reach the op: as a transformers attention implementation, or under F.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tc_volta.batch import mask_unless_plain
from tc_volta.errors import Unsupported
from tc_volta.kernels import KERNELS
from tc_volta.op import flash_attn

_PREFIX = "tc_volta"


def attention_name(kernel: str = "auto") -> str:
    """The name to give transformers for this kernel, registered on first use.

    `model.set_attn_implementation(attention_name("efficient"))` forces one; "auto" takes the best that serves.
    The name stands in AttentionInterface and in AttentionMaskInterface: in the first alone, transformers would
    pass no mask at all, and padding and packing would be ignored in silence.
    Raises ValueError for an unknown kernel.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; there are auto, {', '.join(KERNELS)}")
    # transformers takes any name with "flash" in it for a package of its own to load
    name = _PREFIX if kernel == "auto" else f"{_PREFIX}_{kernel.replace('flash', 'fa')}"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _for_transformers(kernel))
        AttentionMaskInterface.register(name, mask_unless_plain(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]))
    return name


def _for_transformers(kernel: str) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """[B, H, S, D] queries and compact [B, G, T, D] keys in; [B, S, H, D] out, as transformers expects."""
        if dropout:
            raise Unsupported(
                f"dropout is {dropout}; tc_volta's attention offers none: set attention_dropout to 0"
            )
        for name in ("softcap", "s_aux", "position_bias"):
            if others.get(name) is not None:
                raise Unsupported(f"{name} is given; tc_volta's attention does not know it")
        wanted = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        causal = wanted and attention_mask is None and query.shape[2] > 1
        # A mask holds the window already; without one, a window as long as the sequence is none.
        window = others.get("sliding_window") if causal else None
        out = flash_attn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            causal=causal,
            scale=scaling,
            window=window if window and window < key.shape[2] else None,
            kernel=kernel,
        )
        return out.transpose(1, 2), None  # type: ignore[union-attr]

    return attend


class Routing:
    """F.scaled_dot_product_attention goes through tc_volta::flash_attn until `undo`. A context manager too.

    Routings nest: the latest rules, and undoing one leaves the others. Functions that were compiled before are
    compiled anew, since Dynamo guards on the function; `from torch.nn.functional import …` taken earlier is out of
    reach.
    """

    def __init__(self, kernel: str) -> None:
        self.passed_on: dict[str, int] = {}  # reason -> eager calls that went to torch's own instead
        self._active = True
        if not _stack:
            _original.append(F.scaled_dot_product_attention)
        self._function = self._routed(kernel, _original[-1])
        _stack.append(self)
        F.scaled_dot_product_attention = self._function

    def undo(self) -> None:
        """Give F.scaled_dot_product_attention back; again is harmless.

        Where another library has replaced it since, its function stays, and ours below it only passes calls on.
        """
        if not self._active:
            return
        self._active = False
        _stack.remove(self)
        ours = F.scaled_dot_product_attention is self._function
        before = _stack[-1]._function if _stack else _original.pop()
        if ours:
            F.scaled_dot_product_attention = before

    def __enter__(self) -> Routing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _routed(self, kernel: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            why = _not_ours(query, key, value, attn_mask, dropout_p, is_causal)
            if why or not self._active:
                if self._active and not torch.compiler.is_compiling():
                    self.passed_on[why] = self.passed_on.get(why, 0) + 1
                return original(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            return flash_attn(  # type: ignore[return-value]
                query, key, value, attn_mask=attn_mask, causal=is_causal, scale=scale, kernel=kernel
            )

        return scaled_dot_product_attention


def _not_ours(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str:
    if dropout_p:
        return "dropout"
    if query.is_nested:
        return "nested tensors"
    if query.dim() != 4:
        return f"{query.dim()} dimensions"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "batch sizes that broadcast"
    if key.shape[-1] != value.shape[-1]:
        return "head dims of K and V differ"
    if is_causal and query.shape[2] != key.shape[2]:
        return "causal with S != T"
    return "a gradient of the mask" if mask is not None and mask.requires_grad else ""


_stack: list[Routing] = []
_original: list[Callable[..., Tensor]] = []  # torch's own, or whatever stood there before the first routing


def register_flash_attn_volta(kernel: str = "auto") -> Routing:
    """Route F.scaled_dot_product_attention through tc_volta::flash_attn, process-wide. Opt-in; `undo` ends it.

    Calls that the op does not offer (dropout, causal with S != T) go to torch's own, and are counted with the
    reason in `passed_on`. A kernel that was named and cannot serve a call raises there, as `flash_attn` does.
    Raises ValueError for an unknown kernel.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; there are auto, {', '.join(KERNELS)}")
    return Routing(kernel)
