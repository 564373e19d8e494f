"""The loss over several ranks, and the one rule of this package:

    a rank's loss is the sum over its own tokens, divided by the number of tokens of all ranks;
    gradients are summed over dp x cp, never averaged.

So loss, gradients and their norm do not depend on how many ranks share the work, nor on how the labels that count
are spread over them; a shard without any adds nothing. gradients.py brings FSDP2, DDP and plain modules to the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_volta.group import CpGroup
from cp_volta.sharding import IGNORED


def cp_loss(logits: Tensor, labels: Tensor, cp: CpGroup, *, tokens: int | None = None) -> Tensor:
    """The mean cross-entropy over the tokens of all dp x cp ranks; every rank gets its value, and its own gradient.

    logits [B, s, V]; labels [B, s], shifted before they were dealt out, as `Shard.labels`. tokens: what the sum is
    divided by, over all ranks and all micro-batches of a step (`count_tokens`); None: those of this call, which
    costs a collective and a wait for it. Where no label counts anywhere the loss is 0.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels are {list(labels.shape)}, logits {list(logits.shape)}")
    count = count_tokens([labels], cp) if tokens is None else tokens
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total(losses / max(count, 1), cp)


def count_tokens(labels: Iterable[Tensor], cp: CpGroup) -> int:
    """How many labels count, over all dp x cp ranks: of one batch, or of all micro-batches of a step."""
    counts = [(one != IGNORED).sum() for one in labels]
    if not counts:
        raise ValueError("count_tokens needs the labels of at least one micro-batch")
    count = torch.stack(counts).sum()
    dist.all_reduce(count, group=cp.dp_cp_group)
    return int(count)


def total(part: Tensor, cp: CpGroup) -> Tensor:
    """The sum of every rank's part of a loss as the value; the gradient goes to this rank's part alone."""
    summed: Tensor = _Total.apply(part, cp.dp_cp_group)
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = part.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
