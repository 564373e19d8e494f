"""One model in training on N ranks: the shard of this one, a step of it, and the same on one device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import cp_volta
from cp_volta.group import CpGroup
from harness.cells import Task
from harness.rows import Parity
from probes.cp_step import CpStepAxes
from probes.parity import Losses, compare
from probes.train_step import TrainStepAxes
from probes.train_step.reference import eager, reference, scale_of
from probes.train_step.training import Training

CLIP = 1.0
LEARNING_RATE = 1e-5


class Shared:
    """The patched model and this rank's tokens; `step` is what is timed."""

    def __init__(self, axes: CpStepAxes, task: Task, cp: CpGroup) -> None:
        self.axes, self.task, self.cp = axes, task, cp
        self.training = self._stock(axes.compile)
        self.model: nn.Module = self.training.model
        if axes.mode != "none":
            cp_volta.patch_for_cp(self.model, cp, kernel=axes.attention)
        self.sharded = axes.sharding == "fsdp2"
        if self.sharded:
            _shard(self.training.model, cp, self.training.dtype)
        ids = self.training.ids_BS
        self.shard = cp_volta.shard_batch({"input_ids": ids, "labels": ids}, cp)
        assert self.shard.labels is not None
        self.labels: Tensor = self.shard.labels
        self.tokens = cp_volta.count_tokens([self.labels], cp)
        full = axes.step == "full"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE) if full else None
        scaled = full and self.training.dtype == torch.float16
        self.scaler: Any = cp_volta.grad_scaler(cp, enabled=scaled, init_scale=scale_of(self.training))

    def _stock(self, compiled: str = "none") -> Training:
        axes = self.axes
        stock = TrainStepAxes(
            model=axes.model,
            dtype=axes.dtype,
            seq=axes.seq,
            batch=axes.batch,
            checkpointing=axes.checkpointing,
            compile=compiled,  # type: ignore[arg-type]
        )
        return Training(stock, self.task.device, self.task.seed)

    def step(self) -> Tensor:
        """Zero the gradients, forward, backward, their sum over the ranks; full: clip, and update. The whole loss."""
        loss = self._backward(self.scaler.scale)
        if self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
            cp_volta.clip_grad_norm(self.model, CLIP)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def _backward(self, scale: Any) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        logits = self.model(**self.shard.inputs, use_cache=False).logits
        loss = cp_volta.cp_loss(logits, self.labels, self.cp, tokens=self.tokens)
        scale(loss).backward()
        if self.cp.size > 1 and not self.sharded:
            cp_volta.reduce_gradients(self.model, self.cp)
        return loss.detach().clone()

    def check(self, rank: int) -> Parity | None:
        """Loss and gradients of the weights as they are now against one device's, on the first rank."""
        scale = scale_of(self.training)
        loss = float(self._backward(lambda loss: loss * scale))
        weights, grads = self._whole()
        if rank:
            return None
        alone = self._stock()
        alone.model.load_state_dict(weights, strict=False)
        own = eager(alone)
        name, ruler = reference(alone)
        return compare(
            grads,
            own[1],
            ruler[1] if ruler else None,
            dtype=alone.dtype,
            reference_name=name,
            losses=Losses(candidate=loss, eager=own[0], reference=ruler[0] if ruler else None),
        )

    def _whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights in the computation's dtype, and gradients, unsharded; every rank takes part in it."""
        dtype = self.training.dtype
        weights, grads = {}, {}
        for name, parameter in self.model.named_parameters():
            weights[name] = _full(parameter.detach()).to(dtype)
            if parameter.grad is not None:
                grads[name] = _full(parameter.grad).to(dtype)
                parameter.grad = None
        return weights, grads


def _shard(model: Any, cp: CpGroup, dtype: torch.dtype) -> None:
    """FSDP2 over dp x cp: float32 shards, computed in `dtype`, gradients summed in float32."""
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in itertools.chain(model.get_decoder().layers, [model]):
        fully_shard(module, mesh=cp.dp_cp_mesh, mp_policy=policy)
    cp_volta.sum_gradients(model, cp)


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x  # type: ignore[no-untyped-call]
