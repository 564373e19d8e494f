"""transformers' Trainer for sequences that several ranks share: an existing script changes in about three lines.

    args = TrainingArguments(…)                        # as it was; it starts torch.distributed under torchrun
    cp = cp_volta.init_cp_group(4)                     # new
    cp_volta.tile(model)                               # new: no [tokens, vocabulary], MLPs and projections in tiles
    trainer = cp_volta.CpTrainer(model=model, args=args, train_dataset=…, cp=cp)  # Trainer -> CpTrainer, cp=

Ranks that share a sequence get the same batch and each its shard of it; the loss is the mean over the labels of all
ranks and micro-batches, and gradients are the sum, through DDP or FSDP2 (`args.fsdp`). `CpTrainerMixin` does the same
for other trainers that leave the loss to the model: `class MyCpTrainer(CpTrainerMixin, MyTrainer)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from cp_volta.gradients import grad_scaler
from cp_volta.group import CpGroup
from cp_volta.loss import count_tokens, total
from cp_volta.patch import is_patched, patch_for_cp
from cp_volta.sharding import Shard, shard_batch
from cp_volta.tiling import causal_model
from tc_volta.errors import Unsupported


class CpTrainerMixin:
    """To stand before a Trainer among the bases. cp: the ranks; None, or one: the Trainer as it is.

    The model is patched here unless it is already. Evaluation gives the loss alone: no rank has whole logits.
    Raises Unsupported (a ValueError) for what shards of a sequence can't honour, naming it.
    """

    cp: CpGroup | None
    args: Any
    accelerator: Any
    loss_is_scaled_for_ga: bool | None

    def __init__(
        self, model: Any = None, args: Any = None, *more: Any, cp: CpGroup | None = None, **kwargs: Any
    ):
        self.cp = cp if cp is not None and cp.size > 1 else None
        if self.cp is not None:
            _check(model, args, self.cp, kwargs)
            inner = causal_model(model)
            if not is_patched(inner):
                patch_for_cp(inner, self.cp)
        super().__init__(model, args, *more, **kwargs)  # type: ignore[call-arg]
        if self.cp is None:
            return
        self.loss_is_scaled_for_ga = True  # over all micro-batches, by their tokens
        self.gather_function = self._gather
        if self.accelerator.scaler is not None:
            self.accelerator.scaler = grad_scaler(self.cp)

    def get_cp_size(self) -> int:
        """How many ranks a batch is counted once for."""
        return self.cp.size if self.cp is not None else super().get_cp_size()  # type: ignore[misc, no-any-return]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Trainer's, dealt out over data-parallel ranks alone."""
        return _of_dp(super().get_train_dataloader(), self.cp)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As `get_train_dataloader`."""
        return _of_dp(super().get_eval_dataloader(*args, **kwargs), self.cp)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As `get_train_dataloader`."""
        return _of_dp(super().get_test_dataloader(*args, **kwargs), self.cp)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *how: Any) -> tuple[list[Any], Any]:
        """The shards of this rank of the micro-batches of a step, and how many labels count in all of them, on all ranks."""
        batches, items = super().get_batch_samples(epoch_iterator, *how)  # type: ignore[misc]
        if self.cp is None or not batches:
            return batches, items
        shards = [self._shard(batch) for batch in batches]
        tokens = count_tokens([shard.labels for shard in shards if shard.labels is not None], self.cp)
        return [shard.with_labels(tokens) for shard in shards], tokens

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The part of this rank, times the ranks over whose gradients DDP or FSDP2 takes the mean."""
        if self.cp is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        outputs = model(**inputs)
        loss = outputs["loss"] * self.cp.mesh.size()
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        *more: Any,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch, over the labels of all ranks, on every rank."""
        if self.cp is None:
            return super().prediction_step(model, inputs, prediction_loss_only, *more, **kwargs)  # type: ignore[misc, no-any-return]
        shard = self._shard(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        tokens = count_tokens([shard.labels] if shard.labels is not None else [], self.cp)
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss = total(model(**shard.with_labels(tokens))["loss"], self.cp)
        return loss, None, None

    def _shard(self, batch: Mapping[str, Any]) -> Shard:
        assert self.cp is not None
        given = {
            name: value.to(self.args.device) for name, value in batch.items() if isinstance(value, Tensor)
        }
        return shard_batch(given, self.cp)

    def _gather(self, tensor: Tensor) -> Tensor:
        """As accelerate's gather_for_metrics, with one rank of those that share a sequence speaking for all."""
        assert self.cp is not None
        found: Tensor = self.accelerator.gather(tensor).view(-1, len(tensor))[:: self.cp.size].flatten()
        state = self.accelerator.gradient_state
        return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found


class CpTrainer(CpTrainerMixin, Trainer):
    """transformers' Trainer over ranks that share sequences; `CpTrainerMixin` says how."""


def _check(model: Any, args: Any, cp: CpGroup, more: Mapping[str, Any]) -> None:
    """Refuse, before anything is changed, what would be wrong or do nothing."""
    if model is None or args is None:
        raise Unsupported("CpTrainer takes the model and its TrainingArguments: neither can be None with cp")
    if args.world_size != cp.mesh.size():
        raise Unsupported(f"the Trainer works over {args.world_size} ranks, cp's mesh has {cp.mesh.size()}")
    refused = {
        "compute_loss_func": more.get("compute_loss_func"),
        "compute_metrics": more.get("compute_metrics"),
        "label_smoothing_factor": args.label_smoothing_factor,
        "deepspeed": args.deepspeed,
        "parallelism_config": getattr(args, "parallelism_config", None),
    }
    for name, given in refused.items():
        if given:
            raise Unsupported(f"{name} is given; a Trainer over shards of a sequence does not honour it")


def _of_dp(loader: DataLoader[Any], cp: CpGroup | None) -> DataLoader[Any]:
    """accelerate deals batches out over all ranks; here ranks of one cp group are to get the same.

    Its shards are told so where they keep their place, as transformers does for samplers that know the ranks already.
    """
    if cp is None:
        return loader
    shards: Any
    for shards in (loader.batch_sampler, loader.dataset):
        if hasattr(shards, "num_processes") and hasattr(shards, "process_index"):
            shards.num_processes, shards.process_index = cp.dp_size, cp.dp_rank
            if cp.dp_size == 1 and hasattr(shards, "even_batches"):
                shards.even_batches = False  # the last batch would be filled up with rows of the first
            return loader
    raise Unsupported(
        f"{type(loader).__name__} hands a rank what the first one read: for an iterable dataset give "
        'accelerator_config={"dispatch_batches": False}'
    )
