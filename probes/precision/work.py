"""Look at a model's numbers in float32, in the precision asked for, compiled, and over some updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import tc_volta
from cp_volta.overflow import first_nonfinite
from harness.cells import Task
from harness.rows import AttentionReport, CompileReport, Fact, Result
from probes.models.build import twin
from probes.precision import PrecisionAxes, bf16, casts, reach
from probes.precision.backward import first_nonfinite_gradient
from probes.precision.found import Found, facts_of
from probes.precision.judge import judge
from probes.train_step.compiler_view import look
from probes.train_step.evidence import observe
from probes.train_step.memory import out_of_memory
from probes.train_step.training import Training, implementation

_COMPILERS = {"layers": tc_volta.compile_layers, "model": tc_volta.compile}
Grads = dict[str, Tensor]


def run(axes: PrecisionAxes, task: Task) -> Result:
    """The row's verdict names module, value and limit; `oom` and `unsupported` where the model cannot be looked at."""
    try:
        return _Look(axes, task).result()
    except tc_volta.Unsupported as refusal:
        return Result(status="unsupported", reason=str(refusal))
    except (MemoryError, RuntimeError) as error:
        if not (short := out_of_memory(error)):
            raise
        return Result(status="oom", reason=short)


class _Look:
    """One cell: its model, and what was found of it."""

    def __init__(self, axes: PrecisionAxes, task: Task) -> None:
        self.axes, self.device = axes, task.device
        self.facts: dict[str, Fact] = {}
        self.training = Training(axes.step_axes(), task.device, task.seed)
        self.scaled = axes.precision == "amp-fp16"
        self.training.scaler = torch.amp.GradScaler(
            task.device, init_scale=axes.first_scale, enabled=self.scaled
        )
        dtype = self.training.dtype
        support, source = bf16.support(task.device)
        self.found = Found(
            dtype=str(dtype).removeprefix("torch."),
            limit=torch.finfo(dtype).max,
            attention=axes.attention,
            scale=axes.first_scale,
            bf16=f"{support} ({source})",
            compiled=axes.compile != "none",
            updates=axes.updates,
        )
        self.losses: list[float] = []
        self.nulls: dict[str, str] = {}
        self.attention: AttentionReport | None = None
        self.compile: CompileReport | None = None

    def result(self) -> Result:
        """Everything that can be asked of the model; weights that are not finite end the questions."""
        self.found.weights = _nonfinite(dict(self.training.model.named_parameters()))
        if not self.found.weights:
            self._measure_reach()
            scale, gradients = self._eager()
            if self.found.compiled:
                self._compiled(scale, gradients)
            gradients.clear()
            self.attention = observe(self.axes.attention, self._step_once, self.device)
            self._update()
        facts, nulls = facts_of(self.found)
        told: dict[str, Any] = {
            "tokens_per_step": self.axes.batch * self.axes.seq,
            "loss": tuple(self.losses),
            "facts": facts | self.facts,
            "nulls": nulls | self.nulls,
            "attention": self.attention,
            "compile": self.compile,
        }
        if self.attention is not None and not self.attention.honoured:
            reason = f"asked for {self.attention.asked} attention, {self.attention.ran} ran"
            return Result(status="unsupported", reason=reason, **told)
        verdict, reason = judge(self.found)
        return Result(verdict=verdict, verdict_reason=reason, **told)

    def _measure_reach(self) -> None:
        """Values in float32, of everything and of what the precision keeps in its narrow dtype."""
        model = self._twin()
        narrow = reach.kept_in(reach.maxima(model, lambda: self.training.loss(model)), self.training.dtype)
        wide = twin(self.training.model, dtype=torch.float32, attention=reach.attention_name())
        with reach.watching_scores(wide) as scores:
            seen = reach.maxima(wide, lambda: self.training.loss(wide, autocast=False))
        self.found.scores = scores
        self.found.largest = reach.largest_of(seen)
        self.found.narrow = reach.largest_of(seen, narrow)

    def _eager(self) -> tuple[float, Grads]:
        """The first module that overflows, forward and backward; then the first scale, halved as GradScaler
        does, that leaves all gradients finite, and the gradients at it (at the last one tried, if there is none).
        """
        model, scale = self._twin(), self.axes.first_scale
        self.found.forward = first_nonfinite(model, lambda: self.training.loss(model))
        self.found.backward = first_nonfinite_gradient(model, lambda: self._backward(model, scale))
        gradients = _taken(model)
        while _nonfinite(gradients) and scale > 1.0 and not self.found.forward:
            scale = max(1.0, scale / 2)
            self._backward(model, scale)
            gradients = _taken(model)
        self.found.finite_scale = None if _nonfinite(gradients) else scale
        self.found.zero_gradients = tuple(name for name, g in gradients.items() if not bool(g.any()))
        return scale, gradients

    def _compiled(self, scale: float, eager: Grads) -> None:
        """The compiled model's gradients against eager's, as it is and with the roundings emulated."""
        self._backward(self.training.model, scale)
        gradients = _taken(self.training.model)
        self.compile = look(self.training.model, [])
        self.found.fallback = "; ".join(self.compile.fallbacks)
        self.found.compiled_bad = _nonfinite(gradients)
        plain, emulated = casts.distance(gradients, eager), None
        if self.training.dtype != torch.float32:
            model = self._twin()
            _COMPILERS[self.axes.compile](model, options={"emulate_precision_casts": True})
            self._backward(model, scale)
            emulated = casts.distance(_taken(model), eager)
        facts: dict[str, Fact] = {
            "compiled_to_eager": plain,
            "emulated_to_eager": emulated,
            "emulation_moves_towards_eager": None if plain is None or emulated is None else emulated < plain,
        }
        self.facts |= facts | casts.demonstrate(self.device)
        narrow = self.training.dtype != torch.float32
        why = "a gradient is not finite" if narrow else "float32 has no casts to emulate"
        self.nulls |= {f"facts.{name}": why for name, value in facts.items() if value is None}

    def _update(self) -> None:
        """Steps of the optimizer. GradScaler tells that it skipped one only by lowering its scale."""
        scaler = self.training.scaler
        skipped = 0
        for _ in range(self.axes.updates):
            before = scaler.get_scale()
            self.losses.append(float(self.training.step()))
            skipped += scaler.get_scale() < before
        if self.scaled and self.axes.updates:
            self.found.skipped = skipped
        if self.axes.updates:
            self.found.after = _nonfinite(dict(self.training.model.named_parameters()))

    def _step_once(self) -> None:
        self._backward(self.training.model, 1.0)
        _taken(self.training.model)

    def _backward(self, model: PreTrainedModel, scale: float) -> None:
        model.zero_grad(set_to_none=True)
        (self.training.loss(model) * scale).backward()

    def _twin(self) -> PreTrainedModel:
        """The model in the precision asked for, untouched by a compiler."""
        return twin(self.training.model, attention=implementation(self.axes.attention))


def _taken(model: PreTrainedModel) -> Grads:
    """The gradients, moved out of the model, under an uncompiled model's names."""
    grads: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name.replace("_orig_mod.", "")] = parameter.grad
            parameter.grad = None
    return grads


def _nonfinite(tensors: dict[str, Tensor]) -> str:
    """The first that is not finite, and how many of its elements are not."""
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            return f"{name}: {bad:,} of {tensor.numel():,} elements are inf or NaN"
    return ""
