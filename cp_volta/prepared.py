"""What `prepare` made of a model: the decisions, the parts of a step, and the step's loss on one rank or many."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cp_volta.group import CpGroup
from cp_volta.loss import count_tokens, total
from cp_volta.offload import Offloader
from cp_volta.planning import Decision, Plan
from cp_volta.sharding import shard_batch


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made. The model is the caller's own, changed in place. cp: the ranks; None on one alone."""

    model: nn.Module
    plan: Plan
    decisions: tuple[Decision, ...]
    dtype: torch.dtype
    amp: bool
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler
    offloader: Offloader | None
    cp: CpGroup | None

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The forward of one batch, and its mean loss over the labels of all ranks; to be scaled and sent back.

        batch: input_ids and labels [B, S] as transformers has them; over ranks also what else `shard_batch` takes.
        The ranks that share a sequence hold it whole; it is dealt out here, and the loss is every rank's.
        """
        if self.cp is None:
            with self.autocast():
                whole: Tensor = self.model(**batch, use_cache=False).loss
            return whole
        shard = shard_batch(batch, self.cp)
        tokens = count_tokens([shard.labels] if shard.labels is not None else [], self.cp)
        return total(self.model(**shard.with_labels(tokens)).loss, self.cp)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """For the forward; nothing where parameters are in the compute dtype, or FSDP2 casts them."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.dtype, enabled=self.amp)

    def text(self) -> str:
        """Every decision with its reason, and the predicted peak by part."""
        own = [f"{d.name}: {d.value} ({d.reason})" for d in self.decisions]
        return "\n".join([*own, self.plan.text()])
