"""Long context on small cards: tiles of the sequence, checkpoints that wait in host memory.

    cp_volta.tile(model)                                  # no [tokens, vocabulary]; MLPs, norms, projections in tiles
    cp_volta.checkpoint_layers(model, offload=True)       # each layer recomputed, its input in pinned host memory

Importing registers ops and changes nothing else.
"""

from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
from cp_volta.tile import tile, untile
from cp_volta.tiled_loss import tiled_cross_entropy
from cp_volta.tiled_mlp import tiled_mlp

__all__ = ["checkpoint_layers", "tile", "tiled_cross_entropy", "tiled_mlp", "uncheckpoint", "untile"]
