"""Are the loss and the gradients that were timed right? Candidate and eager against higher precision.

Same weights, same batch. Eager is an untouched twin in the same dtype with stock attention. The reference is a
twin in float64 on a CPU, and in float32 (no TF32, math attention) on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from harness.rows import Parity
from probes.float64 import float64_everywhere
from probes.models.build import twin
from probes.parity import Losses, compare
from probes.train_step.training import Training, checkpoint_layers

# As a GradScaler would: most small fp16 gradients underflow without it, and the check would be blind to them. The
# loss of all three is scaled alike, by a power of two, so exactly; the reference's gradients too.
_FP16_SCALE = 1024.0
Grads = dict[str, Tensor]


def check(training: Training) -> Parity:
    """The verdict. Out of memory in here is no failure of the cell: the verdict is then `no_reference`."""
    candidate_loss, candidate = _gradients(training, training.model)
    eager_loss: float | None = None
    eager: Grads | None = None
    try:
        eager_loss, eager = _eager(training)
        name, reference_loss, reference = _reference(training)
    except torch.OutOfMemoryError as error:
        return compare(
            candidate,
            eager,
            None,
            dtype=training.dtype,
            reference_name=f"no memory for a reference: {str(error).splitlines()[0][:200]}",
            losses=Losses(candidate=candidate_loss, eager=eager_loss),
        )
    return compare(
        candidate,
        eager,
        reference,
        dtype=training.dtype,
        reference_name=name,
        losses=Losses(candidate=candidate_loss, eager=eager_loss, reference=reference_loss),
    )


def _eager(training: Training) -> tuple[float, Grads]:
    model = _twin(training, None, "sdpa" if training.device == "cuda" else "eager")
    return _gradients(training, model)


def _reference(training: Training) -> tuple[str, float, Grads]:
    if training.device == "cpu":
        model = _twin(training, torch.float64, "eager")
        with float64_everywhere():
            return _named("float64, eager attention", training), *_gradients(training, model, autocast=False)
    model = _twin(training, torch.float32, "sdpa")
    with _without_tf32(), sdpa_kernel(SDPBackend.MATH):
        name = _named("float32 without TF32, math attention", training)
        return name, *_gradients(training, model, autocast=False)


def _named(reference: str, training: Training) -> str:
    scale = _scale(training)
    return reference if scale == 1.0 else f"{reference}; loss of all scaled by {scale:g}"


def _twin(training: Training, dtype: torch.dtype | None, attention: str) -> PreTrainedModel:
    model = twin(training.model, dtype=dtype, attention=attention)
    if training.device == "cuda":  # math attention of a long sequence fits one layer at a time
        checkpoint_layers(model)
    return model


def _gradients(training: Training, model: PreTrainedModel, autocast: bool = True) -> tuple[float, Grads]:
    """Loss, and every parameter's gradient of the scaled loss, moved out of the model."""
    model.zero_grad(set_to_none=True)
    loss = training.loss(model, autocast)
    (loss * _scale(training)).backward()
    grads: Grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad
            parameter.grad = None
    return float(loss.detach()), grads


def _scale(training: Training) -> float:
    return _FP16_SCALE if training.dtype == torch.float16 else 1.0


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
