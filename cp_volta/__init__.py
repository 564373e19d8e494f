"""Long context on small cards: tiles of the sequence, checkpoints that wait in host memory, a plan of what fits.

    ready = cp_volta.prepare(model, seq=131_072)          # plans, tiles, checkpoints; optimizer and GradScaler
    print(ready.text())                                   # what was decided, and why

    cp_volta.tile(model)                                  # or part by part: no [tokens, vocabulary] …
    cp_volta.checkpoint_layers(model, offload=True)       # … each layer recomputed, its input in pinned host memory

Importing changes nothing, and no torch is imported before one of these names is asked for: `cp_volta.plan` and
`cp_volta.fit` need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
    from cp_volta.overflow import first_nonfinite
    from cp_volta.prepare import Prepared, prepare, unprepare
    from cp_volta.tile import tile, untile
    from cp_volta.tiled_loss import tiled_cross_entropy
    from cp_volta.tiled_mlp import tiled_mlp

__all__ = [
    "Prepared",
    "checkpoint_layers",
    "first_nonfinite",
    "prepare",
    "tile",
    "tiled_cross_entropy",
    "tiled_mlp",
    "uncheckpoint",
    "unprepare",
    "untile",
]

_HOME = {
    "checkpoint_layers": "checkpoint",
    "uncheckpoint": "checkpoint",
    "first_nonfinite": "overflow",
    "Prepared": "prepare",
    "prepare": "prepare",
    "unprepare": "prepare",
    "tile": "tile",
    "untile": "tile",
    "tiled_cross_entropy": "tiled_loss",
    "tiled_mlp": "tiled_mlp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cp_volta' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cp_volta.{_HOME[name]}"), name)
