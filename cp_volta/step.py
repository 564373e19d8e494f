"""What a step is, as far as its memory goes: the model's shape, one rank's work, and the choices to be made.

Arithmetic alone: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["none", "adamw", "adamw8bit", "adamw_host"]
STATE_BYTES = {"none": 0.0, "adamw": 8.0, "adamw8bit": 2.03, "adamw_host": 0.0}  # a parameter, on the device
HOST_STATE_BYTES = {"none": 0.0, "adamw": 0.0, "adamw8bit": 0.0, "adamw_host": 8.0}
# bitsandbytes #1633, 0.50.2: DTensors reach its kernels, an illegal memory access
EIGHT_BIT_SHARDED = (
    "bitsandbytes has no 8-bit states for FSDP2's shards: over several cards take adamw, or adamw_host"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a decoder that decide its memory."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Of one layer's matrices and norms; biases (below 0.01 %) are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output layer, or of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All that are stored: a tied head once."""
        return self.layers * self.layer_parameters + self.head_parameters * (1 if self.tied else 2)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Bytes a token that an attention kernel holds in backward, beside q, k, v, out, their gradients and lse.

    wide: float32 copies of dq [A, D]. expanded: of k and v to all heads, and of their gradients, where it knows no
    grouped queries (forward too), or keeps gradients of all heads until they are summed (`grads_expanded`).
    """

    wide: float
    expanded: bool
    grads_expanded: bool


KERNELS = {
    "flash": Kernel(wide=1, expanded=False, grads_expanded=True),
    "cudnn": Kernel(wide=1, expanded=False, grads_expanded=True),
    "efficient": Kernel(wide=1, expanded=True, grads_expanded=True),
    "xformers": Kernel(wide=1, expanded=True, grads_expanded=True),
    "cpu": Kernel(wide=0, expanded=False, grads_expanded=False),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's step. `shards`: over how many ranks parameters, gradients and states are spread (FSDP2)."""

    tokens: int
    param_bytes: int = 4
    residual_bytes: int = 4
    compute_bytes: int = 2
    optimizer: Optimizer = "none"
    shards: int = 1
    cp: int = 1  # ranks that one sequence is spread over: their exchanges need buffers
    trainable: float = 1.0  # share of the parameters: below 1 with LoRA, the rest frozen
    kernel: str = "flash"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown attention kernel {self.kernel!r}; there are {', '.join(KERNELS)}")
        if self.tokens < 1 or self.shards < 1 or not 0 <= self.trainable <= 1:
            raise ValueError(f"tokens {self.tokens}, shards {self.shards}, trainable {self.trainable}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is tiled (tokens of a tile; 0: not at all), checkpointed and offloaded (layers, the first ones)."""

    loss: int = 0
    mlp: int = 0
    norms: int = 0
    projections: int = 0
    checkpointed: int = 0
    offloaded: int = 0
