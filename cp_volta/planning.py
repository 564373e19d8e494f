"""Which layers to checkpoint, what to tile and what to offload, so that a step fits a budget and loses least time.

Arithmetic on `cp_volta.memory_model`: nothing here imports torch or asks a device. A plan is a prediction; the row
of a run that follows it holds the measured peak beside it.

How it chooses: the loss is tiled always (it costs nothing). Then, of all numbers of checkpointed layers, with the
rest tiled or not, the one with the least work done twice that fits. Only where none fits are checkpoints taken to
the host, as few as needed. Tiles are the largest that fit: they divide nothing but the time to start a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cp_volta.memory_model import Moment, host_bytes, moments
from cp_volta.step import Choice, Shape, Work

GIB = 1 << 30
LOSS_TILES = (8192, 4096, 2048, 1024, 512, 256)
LAYER_TILES = (8192, 4096, 2048, 1024)
MARGIN = 0.04  # of the budget: the allocator's rounding and what the formulas leave out


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice and why it was made."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, the moments it leads to, and the reasons. `again` is the work done twice, as a share of a step's."""

    shape: Shape
    work: Work
    choice: Choice
    moments: tuple[Moment, ...]
    host_bytes: int
    again: float
    decisions: tuple[Decision, ...]

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.bytes)

    def text(self) -> str:
        """The decisions, and the peak by part, for a person."""
        lines = [f"{d.name}: {d.value} ({d.reason})" for d in self.decisions]
        peak = self.peak
        lines.append(f"predicted peak: {gib(peak.bytes)}, at {peak.name}")
        lines += [f"  {name}: {gib(size)}" for name, size in peak.parts.items() if size]
        lines.append(f"pinned host memory: {gib(self.host_bytes)}")
        return "\n".join(lines)


class DoesNotFit(ValueError):
    """No choice fits; the message has the smallest predicted peak and what it is made of."""


def gib(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.2f} GiB"


def plan(
    shape: Shape,
    work: Work,
    *,
    budget_bytes: int,
    host_limit_bytes: int = 0,
    margin: float = MARGIN,
) -> Plan:
    """The choice for one rank's `work` within `budget_bytes` of allocator memory and `host_limit_bytes` pinned.

    budget_bytes: what the allocator may use: the card's budget less its context and the libraries' buffers.
    Raises DoesNotFit (a ValueError) where even all tiled, checkpointed and offloaded does not fit.
    """
    room = int(budget_bytes * (1 - margin))
    best: Plan | None = None
    for choice in _resident(shape):
        found = _sized(shape, work, choice, room)
        if found is not None and (best is None or found.again < best.again):
            best = found
    if best is None:
        best = next(filter(None, _away(shape, work, room, host_limit_bytes)), None)
    if best is None:
        raise DoesNotFit(_refusal(shape, work, budget_bytes, host_limit_bytes))
    return dataclasses.replace(best, decisions=_reasons(best, room, host_limit_bytes))


def longest(
    shape: Shape,
    work_of: Callable[[int], Work],
    *,
    budget_bytes: int,
    host_limit_bytes: int = 0,
    step: int = 1024,
    most: int = 1 << 24,
) -> Plan | None:
    """The plan for the most tokens of one rank, a multiple of `step`, that fits; None where not even `step` does."""

    def at(tokens: int) -> Plan | None:
        try:
            return plan(shape, work_of(tokens), budget_bytes=budget_bytes, host_limit_bytes=host_limit_bytes)
        except DoesNotFit:
            return None

    low, high, best = 0, most // step, None
    while low < high:
        middle = (low + high + 1) // 2
        found = at(middle * step)
        low, high, best = (middle, high, found) if found else (low, middle - 1, best)
    return best


def predict(shape: Shape, work: Work, choice: Choice) -> Plan:
    """What a choice made elsewhere leads to."""
    made = tuple(moments(shape, work, choice))
    host = host_bytes(shape, work, choice)
    return Plan(
        shape=shape,
        work=work,
        choice=choice,
        moments=made,
        host_bytes=host,
        again=again(shape, work, choice),
        decisions=(),
    )


def again(shape: Shape, work: Work, choice: Choice) -> float:
    """Work done twice, as a share of one step's forward and backward.

    A checkpointed layer is computed again, but for a tiled MLP's last product; a tiled MLP that is not
    checkpointed computes gate and up again. Attention over half of the tokens on average (causal).
    """
    mlp = 3 * shape.hidden * shape.mlp
    attention = 2 * shape.heads * shape.head_dim * work.tokens / 2
    layer = shape.layer_parameters + attention
    twice = layer - (mlp / 3 if choice.mlp else 0)
    open_ = shape.layers - choice.checkpointed
    extra = choice.checkpointed * twice + (open_ * 2 / 3 * mlp if choice.mlp else 0)
    return float(extra / (3 * (shape.layers * layer + shape.head_parameters)))


def _resident(shape: Shape) -> Iterator[Choice]:
    """Every number of checkpointed layers, with the layers' insides tiled or not; nothing on the host."""
    for n in range(shape.layers + 1):
        for tile in (0, 1):
            yield Choice(loss=1, mlp=tile, norms=tile, projections=tile, checkpointed=n)


def _away(shape: Shape, work: Work, room: int, host_limit: int) -> Iterator[Plan | None]:
    """All tiled and checkpointed, with more and more checkpoints on the host."""
    for away in range(1, shape.layers + 1):
        tiled = Choice(loss=1, mlp=1, norms=1, projections=1, checkpointed=shape.layers, offloaded=away)
        if host_bytes(shape, work, tiled) > host_limit:
            return
        yield _sized(shape, work, tiled, room)


def _sized(shape: Shape, work: Work, choice: Choice, room: int) -> Plan | None:
    """The choice with the largest tiles that fit, or None. Tiles of 1 in it stand for "tiled"."""
    if predict(shape, work, _with(choice, LOSS_TILES[-1], LAYER_TILES[-1])).peak.bytes > room:
        return None
    layer = next(t for t in LAYER_TILES if _fits(shape, work, _with(choice, LOSS_TILES[-1], t), room))
    loss = next(t for t in LOSS_TILES if _fits(shape, work, _with(choice, t, layer), room))
    return predict(shape, work, _with(choice, loss, layer))


def _fits(shape: Shape, work: Work, choice: Choice, room: int) -> bool:
    return predict(shape, work, choice).peak.bytes <= room


def _with(choice: Choice, loss: int, layer: int) -> Choice:
    return dataclasses.replace(
        choice,
        loss=loss if choice.loss else 0,
        mlp=layer if choice.mlp else 0,
        norms=layer if choice.norms else 0,
        projections=layer if choice.projections else 0,
    )


def _reasons(made: Plan, room: int, host_limit: int) -> tuple[Decision, ...]:
    shape, choice = made.shape, made.choice
    all_of = f"{choice.checkpointed} of {shape.layers} layers"
    fewer = (
        "nothing is computed twice"
        if made.again == 0
        else f"{made.again:.0%} of the step's work is done twice"
    )
    wide = made.work.tokens * shape.vocab * 12
    return (
        Decision(
            name="loss",
            value=f"tiles of {choice.loss} tokens",
            reason=f"untiled, logits and their gradients take {gib(wide)}",
        ),
        Decision(
            name="layers' insides",
            value=f"tiles of {choice.mlp} tokens" if choice.mlp else "not tiled",
            reason="less is computed twice, or fits, so" if choice.mlp else "there is room",
        ),
        Decision(
            name="checkpoints",
            value=all_of,
            reason=f"the fewest that fit {gib(room)} with least work: {fewer}",
        ),
        Decision(
            name="offload",
            value=f"{choice.offloaded} checkpoints on the host" if choice.offloaded else "none",
            reason=f"the device holds the rest; {gib(made.host_bytes)} of {gib(host_limit)} host memory"
            if choice.offloaded
            else "all checkpoints fit on the device",
        ),
    )


def _refusal(shape: Shape, work: Work, budget: int, host_limit: int) -> str:
    n = shape.layers
    least = Choice(loss=256, mlp=1024, norms=1024, projections=1024, checkpointed=n, offloaded=n)
    while least.offloaded and host_bytes(shape, work, least) > host_limit:
        least = dataclasses.replace(least, offloaded=least.offloaded - 1)
    peak = predict(shape, work, least).peak
    parts = ", ".join(f"{name} {gib(size)}" for name, size in peak.parts.items() if size > budget // 50)
    away = f"{least.offloaded} of {n} checkpoints in {gib(host_limit)} of host memory"
    return (
        f"{work.tokens} tokens a rank do not fit {gib(budget)}: all tiled and checkpointed, {away}, the predicted "
        f"peak is {gib(peak.bytes)} at {peak.name}: {parts}"
    )
