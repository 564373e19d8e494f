"""`model(labels=…)` with the tiled loss: the head gets the labels and answers with the loss, never with logits.

The loss is taken inside the head's own call, so that FSDP2's hooks gather the head's weight around it, and so that
a head sharded apart, or tied to the embedding, needs no special case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cp_volta import overlay
from cp_volta.tiled_loss import tiled_cross_entropy


def tile_loss(model: nn.Module, tile: int | None, grad_dtype: torch.dtype | None = None) -> None:
    """Let `model(labels=…)` compute its loss in tiles of `tile` tokens (None: about 1 GiB of logits).

    Without labels the model answers with logits, as before.
    Raises ValueError for a model whose head is no plain nn.Linear, or whose loss is not transformers' own.
    """
    head = head_of(model)
    overlay.put(head, _head_forward, tile=tile, grad_dtype=grad_dtype)
    overlay.put(model, _model_forward)


def head_of(model: nn.Module) -> nn.Linear:
    """The model's output layer. Raises ValueError with what was found instead of one that can be tiled."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get else None
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__}: its head is {type(head).__name__}, not a plain nn.Linear")
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = getattr(model, "loss_function", None)
    if loss is not ForCausalLMLoss:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"{type(model).__name__}: its loss is {name}; the tiled one stands for ForCausalLMLoss"
        )
    return head


def _head_forward(head: nn.Linear, hidden: Tensor, labels: Tensor | None = None, **how: Any) -> Tensor:
    if labels is None:
        logits: Tensor = overlay.original(head)(hidden)
        return logits
    state = overlay.state_of(head)
    return tiled_cross_entropy(
        hidden,
        head.weight,
        labels,
        bias=head.bias,
        tile=state["tile"],
        grad_dtype=state["grad_dtype"],
        **how,
    )


def _model_forward(model: nn.Module, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
    """As the model's own forward, except that with labels `logits` is None."""
    if labels is None:
        return overlay.original(model)(*args, **kwargs)
    if len(args) > 2:
        raise ValueError("a tiled model takes what follows attention_mask by keyword")
    if not (isinstance(keep := kwargs.pop("logits_to_keep", 0), int) and keep == 0):
        raise ValueError("logits_to_keep together with labels: the tiled loss makes no logits")
    how = {
        "num_items": kwargs.pop("num_items_in_batch", None),
        "ignore_index": kwargs.pop("ignore_index", -100),
    }
    shifted = kwargs.pop("shift_labels", None)
    as_tuple = kwargs.pop("return_dict", None) is False
    outputs = model.model(*args, **kwargs)  # type: ignore[operator]
    hidden = outputs.last_hidden_state
    targets = shift(labels, how["ignore_index"]) if shifted is None else shifted
    head = model.get_output_embeddings()  # type: ignore[operator]
    return _answer(head(hidden, labels=targets.to(hidden.device), **how), outputs, as_tuple)


def shift(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels [B, S] such that token n is to predict n + 1; the last predicts nothing."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _answer(loss: Tensor, outputs: Any, as_tuple: bool) -> Any:
    """Everything that the backbone answered, under the names of a causal model's output, and the loss."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    answer = CausalLMOutputWithPast(loss=loss, **rest)
    return answer.to_tuple() if as_tuple else answer
