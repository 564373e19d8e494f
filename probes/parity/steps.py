"""Several training steps of one module, recorded tensor by tensor, for `probes.parity.compare`.

One step hides what lives between steps: a gradient that is the last step's, a buffer that is written once too often,
a second call that goes another way than the first, memory that a later step overwrites. So each step has a batch of
its own, and all of it is compared: outputs, losses, every parameter's and every input's gradient, buffers at the end.

    record(model, batches, schedule)     candidate, eager, eager again: the same call
    reference(model, batches, schedule)  the same in float64 throughout (`probes.float64`), on a twin that the caller
                                         has widened
    verdicts(candidate, eager, again, reference)   outputs and gradients apart, and the worse of the two

Names: "step 2: layers.0.q_proj.weight" is a gradient, "step 2: gradient of input 0", "step 2: output", "buffer x".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from harness.rows import Parity, Verdict
from probes.float64 import float64_everywhere
from probes.parity import Losses, compare

Batch = Sequence[Tensor]
_WORST_FIRST: tuple[Verdict, ...] = ("nonfinite", "mismatch", "no_reference", "caveat", "ok")


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What a step is made of.

    accumulate: micro-batches, each with a forward and backward, whose gradients add up in one step.
    set_to_none: how gradients are cleared between steps; False keeps their memory and fills it with zeros.
    second_backward: each backward is run twice over the same graph (`retain_graph`), so gradients double.
    """

    steps: int = 2
    accumulate: int = 1
    set_to_none: bool = True
    second_backward: bool = False

    @property
    def batches(self) -> int:
        """How many different batches it takes."""
        return self.steps * self.accumulate


@dataclass(kw_only=True)
class Recorded:
    """Copies of what the steps left; `gradients` holds parameter and input gradients, and buffers."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)


def record(
    model: Callable[..., tuple[Tensor, Tensor]],
    owner: nn.Module,
    batches: Sequence[Batch],
    schedule: Schedule,
    *,
    scale: float = 1.0,
    before_step: Callable[[], None] = lambda: None,
) -> Recorded:
    """Take the steps of `schedule` and keep what they leave.

    model: called as model(*batch) -> (output, loss); owner: whose parameters and buffers are read (the module itself,
    where `model` is a compiled wrapper of it).
    batches: `schedule.batches` of them; floating tensors that require gradients get one, integers never do.
    scale: of the loss in backward, a power of two, so that float16 gradients do not underflow.
    Raises ValueError when batches do not fit the schedule.
    """
    if len(batches) != schedule.batches:
        raise ValueError(f"{len(batches)} batches; the schedule takes {schedule.batches}")
    found = Recorded()
    remaining = iter(batches)
    for step in range(1, schedule.steps + 1):
        before_step()
        owner.zero_grad(set_to_none=schedule.set_to_none)
        for part in range(1, schedule.accumulate + 1):
            at = f"step {step}" + (f", part {part}" if schedule.accumulate > 1 else "")
            _forward_backward(model, next(remaining), schedule, scale, at, found)
        for name, parameter in owner.named_parameters():
            if parameter.grad is not None:
                found.gradients[f"step {step}: {_plain(name)}"] = parameter.grad.detach().clone()
    for name, buffer in owner.named_buffers():
        found.gradients[f"buffer {_plain(name)}"] = _floating(buffer)
    return found


def _forward_backward(
    model: Callable[..., tuple[Tensor, Tensor]],
    batch: Batch,
    schedule: Schedule,
    scale: float,
    at: str,
    found: Recorded,
) -> None:
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in batch]
    output, loss = model(*inputs)
    found.outputs[f"{at}: output"] = output.detach().clone()
    found.outputs[f"{at}: loss"] = torch.zeros_like(
        loss
    )  # for its shape and dtype; its value is judged apart
    found.losses[f"{at}: loss"] = _number(loss)
    scaled = loss * scale if scale != 1.0 else loss
    if schedule.second_backward:
        scaled.backward(retain_graph=True)
    scaled.backward()
    for i, tensor in enumerate(inputs):
        if tensor.grad is not None:
            found.gradients[f"{at}: gradient of input {i}"] = tensor.grad.detach().clone()


def reference(
    model: nn.Module, batches: Sequence[Batch], schedule: Schedule, *, scale: float = 1.0
) -> Recorded:
    """The same steps in float64 alone; `model` has been widened. Raises NarrowOperation if one was narrower."""
    wide = [[_wide(t) for t in batch] for batch in batches]
    with float64_everywhere(), _without_autocast():
        return record(model, model, wide, schedule, scale=scale)


def differences(first: Recorded, second: Recorded) -> list[str]:
    """Names whose bits differ between two runs of the same thing, a NaN being equal to itself."""
    one, two = {**first.outputs, **first.gradients}, {**second.outputs, **second.gradients}
    return [name for name in dict.fromkeys([*one, *two]) if not same_bits(one.get(name), two.get(name))]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs with losses, gradients with buffers, and the worse of the two for the row."""

    output: Parity
    grad: Parity
    whole: Parity


def verdicts(
    candidate: Recorded,
    eager: Recorded,
    again: Recorded | None,
    ruler: Recorded | None,
    *,
    dtype: torch.dtype,
    reference_name: str,
) -> Verdicts:
    """The candidate's verdicts. ruler None: none was taken, for the reason in `reference_name`.

    again: eager once more. Where eager does not repeat itself bit by bit, what passes is a caveat that names a
    tensor; what fails still fails, since the candidate is held to the same reference.
    """
    losses = {
        name: Losses(
            candidate=value,
            eager=eager.losses.get(name),
            reference=ruler.losses.get(name) if ruler else None,
        )
        for name, value in candidate.losses.items()
    }
    output = compare(
        candidate.outputs,
        eager.outputs,
        ruler.outputs if ruler else None,
        dtype=dtype,
        reference_name=reference_name,
        losses=losses,
    )
    grad = compare(
        candidate.gradients,
        eager.gradients,
        ruler.gradients if ruler else None,
        dtype=dtype,
        reference_name=reference_name,
    )
    unsteady = differences(eager, again) if again else []
    output, grad = (
        _unsteady(p, side, unsteady) for p, side in ((output, eager.outputs), (grad, eager.gradients))
    )
    return Verdicts(output=output, grad=grad, whole=_whole(output, grad))


def _unsteady(parity: Parity, side: Mapping[str, Tensor], unsteady: list[str]) -> Parity:
    mine = [name for name in unsteady if name in side]
    if not mine or parity.verdict != "ok":
        return parity
    words = f"{parity.reason}; eager twice differs in {len(mine)} tensors, {mine[0]} first"
    return msgspec.structs.replace(parity, verdict="caveat", reason=words)


def _whole(output: Parity, grad: Parity) -> Parity:
    worse = min((output, grad), key=lambda p: _WORST_FIRST.index(p.verdict))
    both = (
        worse.reason
        if output.verdict != grad.verdict
        else f"outputs: {output.reason}; gradients: {grad.reason}"
    )
    return msgspec.structs.replace(
        output,
        verdict=worse.verdict,
        reason=both,
        tensors=output.tensors + grad.tensors,
        worst=(worse.worst if worse is grad or worse.verdict != "ok" else grad.worst),
    )


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _number(loss: Tensor) -> float:
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; a step's loss is one number")
    return float(loss.detach())


def _floating(buffer: Tensor) -> Tensor:
    """Counters and masks are compared as numbers; what floats keeps its dtype."""
    kept = buffer.detach().clone()
    return kept if kept.is_floating_point() else kept.double()


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Shape, dtype and every bit: 0 and -0 differ, and a NaN is itself. False where one is missing."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
