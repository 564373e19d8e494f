"""Gradients over several ranks: summed over dp x cp (loss.py says why), clipped by their whole norm.

FSDP2    fully_shard(layer, mesh=cp.dp_cp_mesh) …; sum_gradients(model, cp) once
DDP      model = DDP(model, process_group=cp.dp_cp_group); sum_gradients(model, cp) once
neither  reduce_gradients(model, cp) after the last backward of a step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_volta.group import CpGroup

BUCKET_BYTES = 64 << 20


def sum_gradients(model: nn.Module, cp: CpGroup) -> None:
    """Make FSDP2's or DDP's reduction a sum over dp x cp instead of a mean. Call it once, after wrapping.

    Raises ValueError for a model that is wrapped by neither, or over other ranks than dp x cp.
    """
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_world_size(model.process_group)
        _check_ranks("DDP", ranks, cp)
        for parameter in model.parameters():
            if (
                parameter.requires_grad
            ):  # before DDP's mean: a sum in its place would sum again what is summed already
                parameter.register_hook(lambda grad: grad * ranks)
        return
    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not wrapped:
        raise ValueError(
            f"{type(model).__name__} is wrapped neither by fully_shard nor by DDP: call reduce_gradients after backward"
        )
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            _check_ranks("fully_shard", parameter.device_mesh.size(), cp)
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def reduce_gradients(model: nn.Module, cp: CpGroup) -> None:
    """Sum the gradients of a model that nothing wraps, over dp x cp; once a step, after its last backward.

    A parameter without a gradient on any rank keeps none; one that has it on some counts as zero on the others.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in parameters):
        raise ValueError(
            "the wrapper reduces this model's gradients already: call sum_gradients once instead"
        )
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device).int()
    dist.all_reduce(present, group=cp.dp_cp_group)
    grads = []
    for parameter, ranks in zip(parameters, present.tolist(), strict=True):
        if ranks:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads.append(parameter.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=cp.dp_cp_group)
        parts = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most max_norm; the norm before, the same on every rank.

    For reduced gradients: whole ones (plain, DDP) or shards (FSDP2), both in one model too. Nothing more is to be
    done over cp: the sum is the gradient of the whole sequence. With a GradScaler, unscale_ first.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [g for g in grads if isinstance(g, DTensor)]
    whole = [g for g in grads if not isinstance(g, DTensor)]
    norms = [_norm(some) for some in (shards, whole) if some]  # DTensors and tensors do not stack
    if not norms:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device, local.dtype))
    return norm


class _GroupScaler(ShardedGradScaler):
    """torch's, made right for fused optimizers, which are handed what was found and skip the step themselves.

    They subtract it from their count of steps, so it has to be a scalar (torch has [1]) and 1 however many ranks found
    something (torch has their sum); and torch shares it in `unscale_` alone, which a fused step does not call.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            found.update({device: (value > 0).float().squeeze() for device, value in found.items()})

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def grad_scaler(cp: CpGroup, **options: Any) -> ShardedGradScaler:
    """A GradScaler for this group: an overflow that one rank alone sees (its shard's) is every rank's skipped step.

    options: those of torch.amp.GradScaler.
    """
    options.setdefault("device", cp.mesh.device_type)
    return _GroupScaler(process_group=cp.dp_cp_group, **options)


def _norm(grads: Sequence[Tensor]) -> Tensor:
    """Over all of them, in float32: the squares of fp16 gradients overflow at 256."""
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # type: ignore[no-untyped-call]
    return norm


def _check_ranks(what: str, found: int, cp: CpGroup) -> None:
    if found != cp.dp_cp_mesh.size():
        raise ValueError(
            f"{what} works over {found} ranks, dp x cp are {cp.dp_cp_mesh.size()}: give it cp.dp_cp_mesh"
        )


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype and device, some 64 MiB of them at a time: few collectives, and a small copy."""
    held: list[Tensor] = []
    size = 0
    for grad in grads:
        if held and (size >= BUCKET_BYTES or (grad.dtype, grad.device) != (held[0].dtype, held[0].device)):
            yield held
            held, size = [], 0
        held.append(grad)
        size += grad.numel() * grad.element_size()
    if held:
        yield held
