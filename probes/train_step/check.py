"""Are the loss and the gradients that were timed right? Candidate and eager against higher precision.

Same weights, same batch, gradients before any optimizer. Whatever memory runs out in here, the timing stands:
the verdict is then `no_reference`, with what was short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.rows import Parity
from probes.parity import Losses, compare
from probes.train_step.memory import attempt, free_bytes, release
from probes.train_step.reference import Grads, Side, eager, gradients, reference
from probes.train_step.training import Training


def check(training: Training) -> Parity:
    """The verdict on one more step of `training`. Its memory is not in the recorded peaks: those were read before."""
    if training.axes.lora:
        return Parity(verdict="no_reference", reason="gradients of adapters are not compared")
    release()
    roomy = _roomy(training)
    candidate, short = attempt(lambda: _parked(gradients(training, training.model), roomy))
    if candidate is None:
        return Parity(verdict="no_reference", reason=f"no memory to take the gradients once more: {short}")
    eager_side, short = attempt(lambda: _parked(eager(training), roomy))
    if eager_side is None:
        return _compared(training, candidate, None, f"no memory for eager: {short}", None)
    name, reference_side = reference(training)
    return _compared(training, candidate, eager_side, name, reference_side)


def _compared(
    training: Training, candidate: Side, eager_side: Side | None, name: str, ruler: Side | None
) -> Parity:
    losses = Losses(
        candidate=candidate[0],
        eager=eager_side[0] if eager_side else None,
        reference=ruler[0] if ruler else None,
    )
    parity, short = attempt(
        lambda: compare(
            _Near(candidate[1], training.device),
            _Near(eager_side[1], training.device) if eager_side else None,
            ruler[1] if ruler else None,
            dtype=training.dtype,
            reference_name=name,
            losses=losses,
        )
    )
    return parity or Parity(verdict="no_reference", reason=f"no memory for the comparison: {short}")


def _roomy(training: Training) -> bool:
    """Whether two sets of gradients may stay on the device beside a float32 reference's weights and gradients."""
    weights = sum(p.numel() for p in training.model.parameters())
    return training.device == "cpu" or free_bytes(training.device) > 8 * 4 * weights


def _parked(side: Side, roomy: bool) -> Side:
    """The same, its gradients on the host if the device is small."""
    return side if roomy else (side[0], {name: grad.cpu() for name, grad in side[1].items()})


class _Near(Mapping[str, Tensor]):
    """Gradients that come to the device one at a time, as they are asked for; a float64 sum on a host is slow."""

    def __init__(self, grads: Grads, device: str) -> None:
        self._grads, self._device = grads, torch.device(device)

    def __getitem__(self, name: str) -> Tensor:
        return self._grads[name].to(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self._grads

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)
