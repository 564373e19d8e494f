"""What a training step holds in memory at the moments that can be its largest. Arithmetic alone: no torch here.

Legend: T tokens of one rank, H hidden, M intermediate, A heads, K KV heads, D head dimension, V vocabulary,
        L layers; p, r, c bytes of a parameter, of the residual stream, of the compute dtype; n layers checkpointed.

The moments (each is a sum of parts; the peak is the largest):
  loss       everything saved by the forward, and the head's work: logits, gradients formed early
  head       backward through the head and the last norm
  layer i    backward of one layer: recomputed if i < n; then its MLP, or its attention, whichever is larger
  embedding  the dense gradient of the embedding beside all other gradients
  step       the optimizer's own temporaries

Saved by one layer, tiled: its input, the sum after attention (T H r each), q, k, v and the attention's output
(T D c (2 A + 2 K)), lse (4 T A). Untiled, more: see `_saved`. What an attention kernel holds beside its inputs and
outputs is in `cp_volta.step.KERNELS`: read from torch's source, not measured, and the first thing to correct from rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cp_volta.step import HOST_STATE_BYTES, KERNELS, STATE_BYTES, Choice, Shape, Work


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One of the moments that can be the peak, and what is there then, in bytes."""

    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def moments(shape: Shape, work: Work, choice: Choice) -> list[Moment]:
    """Every moment that can be the peak of one step, in order."""
    return list(_Timeline(shape, work, choice).walk())


def host_bytes(shape: Shape, work: Work, choice: Choice) -> int:
    """Pinned host memory: the offloaded checkpoints, and an optimizer's states where they live there."""
    states = HOST_STATE_BYTES[work.optimizer] * shape.parameters * work.trainable / work.shards
    return int(choice.offloaded * work.tokens * shape.hidden * work.residual_bytes + states)


class _Timeline:
    """The sizes of a step, and its moments built from them."""

    def __init__(self, shape: Shape, work: Work, choice: Choice) -> None:
        self.s, self.w, self.c = shape, work, choice
        t = work.tokens
        self.residual = t * shape.hidden * work.residual_bytes  # one [T, H] of the residual stream
        self.narrow = t * shape.hidden * work.compute_bytes
        self.query = t * shape.heads * shape.head_dim * work.compute_bytes
        self.key = t * shape.kv_heads * shape.head_dim * work.compute_bytes
        self.wide = t * shape.mlp * work.compute_bytes  # one [T, M]
        self.amp = work.residual_bytes != work.compute_bytes
        self.full = work.trainable == 1.0
        self.cpu = work.kernel == "cpu"
        # A CPU has no float32 sum of half products, and no float32 softmax of half logits: it makes wide copies.
        self.widened = 4 if self.cpu and work.compute_bytes < 4 else 0

    # What stays through the step

    def standing(self, grads_of_layers: int, embedding: bool = False) -> dict[str, int]:
        s, w = self.s, self.w
        done = grads_of_layers * s.layer_parameters + s.head_parameters
        done += s.head_parameters if embedding and not s.tied else 0
        parts = {
            "parameters": s.parameters * w.param_bytes // w.shards,
            "gradients": int(min(done, s.parameters) * w.trainable * w.param_bytes / w.shards),
            "optimizer": int(STATE_BYTES[w.optimizer] * s.parameters * w.trainable / w.shards),
            "positions": 2 * w.tokens * s.head_dim * w.residual_bytes
            + 24 * w.tokens,  # cos, sin; ids, labels
        }
        if (
            w.shards > 1
        ):  # gathered weights of the root and two layers, and one layer's gradients, all in compute
            gathered = s.head_parameters * (1 if s.tied else 2) + 3 * s.layer_parameters
            parts["gathered"] = gathered * w.compute_bytes + s.layer_parameters * w.param_bytes
        return parts

    def checkpoints(self, up_to: int, in_flight: int = 2) -> int:
        """Inputs of the checkpointed layers below `up_to` that are on the device, two on their way included."""
        n, away = min(self.c.checkpointed, up_to), min(self.c.offloaded, up_to)
        return (n - away + min(in_flight, away)) * self.residual

    # One layer

    def keeps_residual(self) -> bool:
        """Whether a norm saves its input itself: transformers' saves a float32 copy instead, where one is made."""
        return bool(self.c.norms) or self.w.residual_bytes >= 4

    def saved(self) -> int:
        """What a layer keeps for its backward, its input not counted."""
        attention = 2 * self.query + 2 * self.key + 4 * self.w.tokens * self.s.heads
        middle = self.residual if self.keeps_residual() else 0
        return attention + middle + self.saved_norms() + self.saved_mlp()

    def saved_norm(self) -> int:
        """An untiled norm's, beside its input: the upcast where it is one, and the normalised."""
        upcast = 4 * self.w.tokens * self.s.hidden if self.w.residual_bytes < 4 else 0
        return upcast + self.residual

    def saved_norms(self) -> int:
        """Both norms', and what the products after them save: the product with the norm's weight, cast under amp."""
        c = self.c
        after = 0 if c.norms else 2 * self.saved_norm()
        if not (c.norms and c.projections):
            after += 3 * self.narrow if self.amp and not c.projections else self.residual
        if not (c.norms and c.mlp):
            after += 2 * self.narrow if self.amp and not c.mlp else self.residual
        return after

    def saved_mlp(self) -> int:
        return 0 if self.c.mlp else 4 * self.wide

    def expanded(self) -> bool:
        return KERNELS[self.w.kernel].expanded and self.s.kv_heads < self.s.heads

    def exchange(self) -> int:
        """Send and receive buffers of context parallelism: q, k, v and out once more, about."""
        return 2 * self.query + 2 * self.key if self.w.cp > 1 else 0

    def working(self) -> int:
        """The most that one layer's backward holds beside what it saved: in its MLP, or in its attention."""
        return max(self.mlp_backward(), self.attention_backward(), self.norm_backward())

    def norm_backward(self) -> int:
        """Of the norm before an MLP, untiled: about four float32 gradients; the MLP's own is gone by then."""
        if self.c.norms:
            return 0
        return self.residual + 4 * 4 * self.w.tokens * self.s.hidden - self.residual - self.saved_mlp()

    def cast_weights(self) -> int:
        """Under autocast an untiled product keeps its weight's half copy; a tiled one makes it for the call alone."""
        if not self.amp:
            return 0
        s, c = self.s, self.c
        qkv = s.hidden * s.head_dim * (s.heads + 2 * s.kv_heads)
        kept = (
            s.hidden * s.head_dim * s.heads
            + (0 if c.projections else qkv)
            + (0 if c.mlp else 3 * s.hidden * s.mlp)
        )
        return kept * self.w.compute_bytes

    def mlp_backward(self) -> int:
        s, w, c = self.s, self.w, self.c
        incoming = self.residual + (self.narrow if self.amp else 0)
        if not c.mlp:  # two gradients of width M beside the four saved
            return incoming + 2 * self.wide
        rows = min(c.mlp, w.tokens)
        buffers = 5 if self.cpu else 3  # of width M; on a GPU the three of them become the gradients in place
        tile = rows * (buffers * s.mlp + 2 * s.hidden) * w.compute_bytes
        tile += rows * (s.mlp + s.hidden) * self.widened
        weights = int(3 * s.hidden * s.mlp * w.trainable)
        sums = weights * (4 if rows < w.tokens else w.param_bytes)
        casts = 3 * s.hidden * s.mlp * w.compute_bytes if w.param_bytes != w.compute_bytes else 0
        return incoming + self.residual + tile + sums + casts

    def attention_backward(self) -> int:
        """Less the sum after attention, and what the MLP saved: both are gone by then."""
        kernel, t, s = KERNELS[self.w.kernel], self.w.tokens, self.s
        gone = self.residual + self.saved_mlp()
        grouped = s.kv_heads < s.heads
        inside = int(kernel.wide * 4 * t * s.heads * s.head_dim)
        inside += 2 * self.query if kernel.expanded and grouped else 0
        inside += 2 * self.query - 2 * self.key if kernel.grads_expanded and grouped else 0
        inside += self.exchange()
        grads = 2 * self.query + 2 * self.key  # dout, dq, dk, dv
        return self.residual + grads + inside + 4 * t * s.heads - gone

    # The moments

    def walk(self) -> Iterator[Moment]:
        n, layers = self.c.checkpointed, self.s.layers
        open_layers = layers - n
        casts = {"cast weights": n * self.cast_weights()}  # autocast's cache holds them until forward ends
        stack = {
            "checkpoints": self.checkpoints(n, 0 if self.cpu else 2),
            "saved": open_layers
            * (self.saved() + self.cast_weights() + (self.residual if self.keeps_residual() else 0)),
        }
        yield self.forward_layer({**stack, **casts})
        yield Moment(
            name="loss", parts={**self.standing(0), **stack, **casts, **self.loss_forward(), "gradients": 0}
        )
        yield Moment(name="head", parts={**self.standing(0), **stack, **self.loss_backward(), "gradients": 0})
        if open_layers:
            yield self.layer(layers - 1, {**stack, "working": self.working()})
        for i in {n - 1, 0} if n else set():
            again = self.saved() + self.working() + self.cast_weights()
            parts = {"checkpoints": self.checkpoints(i + 1), "recomputed layer": again}
            yield self.layer(i, parts)
        yield self.embedding()
        if self.w.optimizer != "none":
            yield Moment(name="step", parts=self.standing(layers, embedding=True))

    def forward_layer(self, stack: dict[str, int]) -> Moment:
        inside = (
            self.saved() + 2 * self.residual + self.exchange() + (2 * self.query if self.expanded() else 0)
        )
        below = {**stack, "saved": max(0, stack["saved"] - self.saved() - self.residual)}
        return Moment(name="forward", parts={**self.standing(0), **below, "layer": inside, "gradients": 0})

    def layer(self, i: int, parts: dict[str, int]) -> Moment:
        return Moment(name=f"layer {i}", parts={**self.standing(self.s.layers - 1 - i), **parts})

    def loss_forward(self) -> dict[str, int]:
        s, w, t = self.s, self.w, self.w.tokens
        hidden = self.last_norm() + self.residual
        if not self.c.loss:
            cast = self.narrow if self.amp else 0
            wide = w.compute_bytes + 4 if w.compute_bytes < 4 else 4
            logits = t * s.vocab * (wide + 4)
            return {"hidden": hidden + cast, "logits": logits, "head gradient": self.head_cast()}
        rows = min(self.c.loss, t)
        # On a GPU the logits become their gradients in place (`triton_rows`); torch's own operations need copies.
        apart = 6 + self.widened if w.compute_bytes < 4 else 8
        each = apart if self.cpu else w.compute_bytes
        return {
            "hidden": hidden + self.residual,
            "logits": rows * (s.vocab * each + s.hidden * 4),
            "head gradient": self.head_sum() + self.head_cast(),
        }

    def loss_backward(self) -> dict[str, int]:
        s, w, t = self.s, self.w, self.w.tokens
        hidden = self.last_norm()
        grads = int(s.head_parameters * w.param_bytes * (w.trainable == 1.0))
        if not self.c.loss:
            # log-probabilities, their gradient and the logits', in float32; the caller keeps the loss alone
            hidden += self.narrow if self.amp else self.residual
            return {"hidden": hidden, "logits": t * s.vocab * 12, "head gradient": self.head_cast()}
        return {"hidden": hidden + 2 * self.residual, "head gradient": self.head_sum() + grads}

    def last_norm(self) -> int:
        """What the norm before the head saves."""
        return (self.residual if self.keeps_residual() else 0) + (0 if self.c.norms else self.saved_norm())

    def head_sum(self) -> int:
        return self.s.head_parameters * 4 if self.full else 0

    def head_cast(self) -> int:
        return (
            self.s.head_parameters * self.w.compute_bytes if self.w.param_bytes != self.w.compute_bytes else 0
        )

    def embedding(self) -> Moment:
        extra = int(self.s.head_parameters * self.w.param_bytes) if self.full else 0
        parts = {**self.standing(self.s.layers), "embedding": extra + self.residual + 24 * self.w.tokens}
        return Moment(name="embedding", parts=parts)
