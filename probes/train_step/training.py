"""The model, its batch and its step, as the axes ask for them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import cp_volta
import tc_volta
from cp_volta.offload import Offloader
from probes.models import shape_of, train_flops
from probes.models.build import DTYPES, build, with_adapters
from probes.text import tokens
from probes.train_step import CUDAGRAPH_MODES, TrainStepAxes, torch_math

_COMPILERS = {
    "mlp": tc_volta.compile_mlp_only,
    "layers": tc_volta.compile_layers,
    "model": tc_volta.compile,
}
# What of the model `tile` is asked for.
_TILED: dict[str, dict[str, Any]] = {
    "loss": {"mlp": False, "norms": False, "projections": False},
    "loss-mlp": {"norms": False, "projections": False},
    "all": {},
}


class Training:
    """One model in training on one device. `step` is what is timed."""

    def __init__(self, axes: TrainStepAxes, device: str, seed: int, budget_bytes: int | None = None) -> None:
        self.axes = axes
        self.device = device
        self.dtype = DTYPES[axes.dtype]
        self.amp = axes.precision == "amp"
        self.cudagraphs = axes.compile != "none" and axes.mode in CUDAGRAPH_MODES
        self.model = build(
            axes.model,
            device=device,
            dtype=torch.float32 if self.amp else self.dtype,
            attention=implementation(axes.attention),
            seed=seed,
        )
        self.ids_BS = tokens(axes.batch, axes.seq, device)
        shape = shape_of(axes.model)
        self.flops = train_flops(shape, axes.batch, axes.seq) if shape else None
        if axes.lora:
            self.model = with_adapters(self.model, axes.lora)
        self.planned = self._plan(budget_bytes) if axes.tiling == "plan" else None
        self.offloader = self.planned.offloader if self.planned else self._arrange()
        if axes.compile != "none":
            _COMPILERS[axes.compile](self.model, mode=axes.mode)
        self.optimizer = (
            self.planned.optimizer
            if self.planned
            else cp_volta.make_optimizer(self.model, axes.optimizer, 1e-5)
        )
        own = torch.amp.GradScaler(device, enabled=self.amp and self.dtype == torch.float16)
        self.scaler = self.planned.scaler if self.planned else own

    def _plan(self, budget_bytes: int | None) -> cp_volta.Prepared:
        return cp_volta.prepare(
            self.model,
            seq=self.axes.seq,
            batch=self.axes.batch,
            dtype=self.dtype,
            optimizer=self.axes.optimizer,
            budget_bytes=budget_bytes,
            attention="keep",
        )

    def _arrange(self) -> Offloader | None:
        """Tiles and checkpoints as the axes say."""
        axes = self.axes
        if axes.tiling != "none":
            cp_volta.tile(self.model, **_TILED[axes.tiling])
        if axes.offload:
            return cp_volta.checkpoint_layers(self.model, offload=True)
        if axes.checkpointing and axes.tiling != "none":
            cp_volta.checkpoint_layers(self.model)  # a tiled MLP's last product is then not computed again
        elif axes.checkpointing:
            checkpoint_layers(self.model)
        return None

    def step(self) -> Tensor:
        """Zero the gradients, forward with loss, backward, and for a full step the optimizer. Returns the loss."""
        if self.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(self.model)
        self.scaler.scale(loss).backward()
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        # A copy: with cudagraphs the loss itself lives in memory that the next step overwrites.
        return loss.detach().clone()

    def loss(self, model: PreTrainedModel, autocast: bool = True) -> Tensor:
        """The stock loss of a model on this batch, under this training's autocast."""
        with self.autocast() if autocast else contextlib.nullcontext():
            out = model(input_ids=self.ids_BS, labels=self.ids_BS, use_cache=False)
        loss: Tensor = out.loss
        return loss

    def autocast(self) -> torch.autocast:
        """Autocast to the axes' dtype; off for plain precision."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.amp)


def implementation(attention: str) -> str:
    """What transformers calls this value of the attention axis; registers it where it is ours.

    Raises ValueError for a kernel that tc_volta does not know.
    """
    if attention in ("eager", "sdpa"):
        return attention
    return torch_math.attention_name() if attention == "math" else tc_volta.attention_name(attention)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in backward, non-reentrant."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
