"""How large a model's numbers are: every module's, and the scores of its attention.

Measured on a float32 twin, where nothing overflows, so that a row tells the value a dtype would have had to hold.
Legend: B batch, H heads, S sequence, D head dimension, T a tile of S.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_NAME = "sdpa_watching_scores"
_TILE = 512  # queries whose scores exist at a time


@dataclass(frozen=True)
class Largest:
    """The largest absolute value, and the module (or "input of" one) that has it."""

    value: float = 0.0
    where: str = ""

    def or_(self, value: float, where: str) -> Largest:
        """The larger of the two; on a tie the one that came first."""
        return Largest(value, where) if value > self.value else self


@dataclass
class Scores:
    """Largest |query . key| over all pairs, masked ones too: attention that is written out forms them first."""

    unscaled: Largest = field(default_factory=Largest)
    scaled: Largest = field(default_factory=Largest)


class Seen(NamedTuple):
    """One tensor that passed a module."""

    where: str  # "module", or "input of module"
    at: int  # how many came before it there
    most: Tensor  # its largest absolute value, a scalar in its own dtype


def maxima(model: nn.Module, forward: Callable[[], Any]) -> list[Seen]:
    """One forward without gradients: every module's tensors in order of execution, the loss (a scalar) left out.

    A tensor comes once for every module it passes.
    """
    seen: list[Seen] = []
    counts: collections.Counter[str] = collections.Counter()

    def note(where: str, tree: Any) -> None:
        for tensor in _floating(tree):
            seen.append(Seen(where, counts[where], tensor.abs().max()))
            counts[where] += 1

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, given: Any, made: Any) -> None:
            note(f"input of {name}", given)
            note(name, made)

        return look

    handles = [
        module.register_forward_hook(hook(name or type(model).__name__))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def kept_in(seen: Iterable[Seen], dtype: torch.dtype) -> set[tuple[str, int]]:
    """Which tensors, by place and order there, have this dtype."""
    return {(one.where, one.at) for one in seen if one.most.dtype == dtype}


def largest_of(seen: Iterable[Seen], among: Container[tuple[str, int]] | None = None) -> Largest:
    """The largest of all, or of the tensors `among`; a NaN counts as infinity."""
    found = Largest()
    for one in seen:
        if among is None or (one.where, one.at) in among:
            value = torch.nan_to_num(one.most.float(), nan=torch.inf, posinf=torch.inf)
            found = found.or_(float(value), one.where)
    return found


def attention_name() -> str:
    """transformers' sdpa, with a look at the scores inside `watching_scores`; registered on first use."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return _NAME


@contextlib.contextmanager
def watching_scores(model: nn.Module) -> Iterator[Scores]:
    """Scores of the forwards inside, of a model whose attention is `attention_name()`."""
    scores = Scores()
    watched = [
        (name, module) for name, module in model.named_modules() if hasattr(module, "num_key_value_groups")
    ]
    for name, module in watched:
        cast(Any, module)._scores = (name, scores)
    try:
        yield scores
    finally:
        for _, module in watched:
            del module._scores


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    name, scores = cast(Any, module)._scores
    groups = query.shape[1] // key.shape[1]
    key_BHDS = key.repeat_interleave(groups, 1).transpose(2, 3)
    unscaled = max(float((q_BHTD @ key_BHDS).abs().max()) for q_BHTD in query.split(_TILE, dim=2))
    scores.unscaled = scores.unscaled.or_(unscaled, name)
    scores.scaled = scores.scaled.or_(unscaled * float(options["scaling"]), name)
    out, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out, None


def _floating(tree: Any) -> list[Tensor]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [t for t in tensors if t.is_floating_point() and t.dim() and t.numel()]
