"""The loss and gradients that the timed ones are judged by: eager's own, and some in higher precision.

Each is a twin of the measured model: same class, same weights, none of what tc_volta did to it. References are
tried from the best that fits to the cheapest: float64 throughout; float32 (no TF32); on a GPU, float32 with the
CUTLASS kernel, whose memory does not grow with the square of the length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import tc_volta
from probes.float64 import NarrowOperation, float64_everywhere
from probes.models.build import twin
from probes.train_step.memory import attempt, free_bytes
from probes.train_step.training import Training, checkpoint_layers

# As a GradScaler would: most small fp16 gradients underflow without it, and the check would be blind to them.
# All three losses are scaled alike, by a power of two, so exactly.
_FP16_SCALE = 1024.0
# A GPU's float64 may be 64 times slower than its float32; more work than this waits for float32's turn.
_FLOAT64_FLOPS = 2e12
# Families whose loss is the plain one, so that it may be computed in tiles.
_PLAIN_LOSS = ("qwen2", "qwen3", "llama")
_TILE = 1024
Grads = dict[str, Tensor]
Side = tuple[float, Grads]


@dataclass(frozen=True)
class Reference:
    """One rung: its name as rows tell it, and the work."""

    name: str
    run: Callable[[], Side]


def eager(training: Training) -> Side:
    """Loss and gradients of an untouched twin in the same dtype with transformers' own attention."""
    model = _twin(training, None, "sdpa" if training.device == "cuda" else "eager")
    return gradients(training, model)


def reference(training: Training) -> tuple[str, Side | None]:
    """The best reference that fits, and its name; or why there is none, and None."""
    failed: list[str] = []
    for rung in _ladder(training):
        try:
            side, short = attempt(rung.run)
        except (NarrowOperation, ValueError) as error:
            # This rung is not for this machine; the next one may be.
            side, short = None, str(error).partition("\n")[0]
        if side is not None:
            return _named(rung.name, training), side
        failed.append(f"{rung.name}: {short}")
    return f"no memory for a reference: {'; '.join(failed) or 'float32 would not fit either'}", None


def gradients(training: Training, model: PreTrainedModel) -> Side:
    """The stock loss, and every parameter's gradient of the scaled loss, moved out of the model."""
    return _backward(training, model, lambda: training.loss(model))


def tiled_loss(model: PreTrainedModel, ids_BS: Tensor) -> Tensor:
    """The stock causal loss of `ids_BS` on itself, with the logits of 1,024 tokens at a time.

    [S, vocab] in float32 is 5 GB at 8,192 tokens, and the stock loss holds it three times.
    """
    hidden_BSH: Tensor = model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
    hidden_NH = hidden_BSH[:, :-1].flatten(0, 1)
    targets_N = ids_BS[:, 1:].flatten()
    head = model.get_output_embeddings()
    tiles = zip(hidden_NH.split(_TILE), targets_N.split(_TILE), strict=True)
    sums = [checkpoint(_tile_loss, head, h_TH, t_T, use_reentrant=False) for h_TH, t_T in tiles]
    return torch.stack(sums).sum() / targets_N.numel()


def _tile_loss(head: torch.nn.Module, hidden_TH: Tensor, targets_T: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(head(hidden_TH), targets_T, reduction="sum")


def _ladder(training: Training) -> Iterator[Reference]:
    free = free_bytes(training.device)
    cheap = training.flops is not None and training.flops <= _FLOAT64_FLOPS
    worth = cheap or training.device == "cpu" or training.dtype == torch.float32
    if worth and _needs_bytes(training, 8) < 0.8 * free:
        yield Reference("float64, eager attention", lambda: _float64(training))
    if training.device == "cuda":
        yield Reference("float32 without TF32, eager attention", lambda: _float32(training, "eager"))
        yield Reference("float32 without TF32, CUTLASS attention", lambda: _float32(training, "efficient"))
    elif _needs_bytes(training, 4) < 0.8 * free:
        yield Reference("float32, eager attention", lambda: _float32(training, "eager"))


def _needs_bytes(training: Training, width: int) -> int:
    """Weights and gradients, the logits three times, and one layer's scores four times."""
    config = training.model.config
    tokens, seq = training.ids_BS.numel(), training.ids_BS.shape[1]
    weights = sum(p.numel() for p in training.model.parameters())
    scores: int = tokens * seq * config.num_attention_heads
    logits: int = tokens * config.vocab_size
    return width * (2 * weights + 3 * logits + 4 * scores)


def _float64(training: Training) -> Side:
    model = _twin(training, torch.float64, "eager")
    with float64_everywhere():
        return _backward(training, model, lambda: _loss(training, model))


def _float32(training: Training, attention: str) -> Side:
    name = "eager" if attention == "eager" else tc_volta.attention_name(attention)
    model = _twin(training, torch.float32, name)
    with _without_tf32():
        return _backward(training, model, lambda: _loss(training, model))


def _loss(training: Training, model: PreTrainedModel) -> Tensor:
    """Without autocast; in tiles where memory is a device's and the family's loss is the plain one."""
    if training.device == "cuda" and model.config.model_type in _PLAIN_LOSS:
        return tiled_loss(model, training.ids_BS)
    return training.loss(model, autocast=False)


def _backward(training: Training, model: PreTrainedModel, loss: Callable[[], Tensor]) -> Side:
    model.zero_grad(set_to_none=True)
    value = loss()
    (value * scale_of(training)).backward()
    grads: Grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad
            parameter.grad = None
    return float(value.detach()), grads


def _twin(training: Training, dtype: torch.dtype | None, attention: str) -> PreTrainedModel:
    model = twin(training.model, dtype=dtype, attention=attention)
    if training.device == "cuda" or training.axes.checkpointing:
        checkpoint_layers(model)  # the attention of a long sequence fits one layer at a time
    return model


def scale_of(training: Training) -> float:
    """What the loss is multiplied by before the backward, for every side alike."""
    return _FP16_SCALE if training.dtype == torch.float16 else 1.0


def _named(name: str, training: Training) -> str:
    scale = scale_of(training)
    return name if scale == 1.0 else f"{name}; loss of all scaled by {scale:g}"


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
