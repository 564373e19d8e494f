"""Long context: a sequence shared by several ranks, tiles of it, checkpoints in host memory, and a plan of these.

    ready = cp_volta.prepare(model, seq=131_072)          # all of it, in one call; ready.text() says what and why
    cp_volta.tile(model)                                  # no [tokens, vocabulary]; MLPs, norms, projections in tiles
    cp_volta.checkpoint_layers(model, offload=True)       # each layer recomputed, its input in pinned host memory
    cp = cp_volta.init_cp_group(4, ulysses=2)             # dp x ring x ulysses ranks
    cp_volta.patch_for_cp(model, cp)                      # attention over all ranks; each holds its shard
    shard = cp_volta.shard_batch(batch, cp)               # ids, labels, positions of this rank
    loss = cp_volta.cp_loss(model(**shard.inputs).logits, shard.labels, cp)
    cp_volta.plan(shape, work, budget_bytes=…)            # arithmetic alone: torch is not imported

Importing changes nothing: a name brings its module, and torch with it, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cp_volta.attention import RingAttention, UlyssesAttention, attend
    from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
    from cp_volta.comm import counting
    from cp_volta.fitting import fit
    from cp_volta.gradients import clip_grad_norm, grad_scaler, reduce_gradients, sum_gradients
    from cp_volta.group import CpGroup, init_cp_group
    from cp_volta.host_adamw import HostAdamW
    from cp_volta.loss import count_tokens, cp_loss, total
    from cp_volta.overflow import first_nonfinite
    from cp_volta.patch import patch_for_cp, patch_llama, patch_qwen2, patch_qwen3, unpatch
    from cp_volta.planning import longest, plan, predict
    from cp_volta.prepared import Prepared
    from cp_volta.preparing import make_optimizer, prepare, shape_of, unprepare
    from cp_volta.sharding import Shard, gather, shard_batch
    from cp_volta.step import Choice, Shape, Work
    from cp_volta.tiled_ffn import tiled_mlp
    from cp_volta.tiled_loss import tiled_cross_entropy
    from cp_volta.tiled_norm import tiled_rms_norm
    from cp_volta.tiling import tile, untile
    from cp_volta.trainer import CpTrainer, CpTrainerMixin

_HOMES = {
    "attention": ("RingAttention", "UlyssesAttention", "attend"),
    "checkpoint": ("checkpoint_layers", "uncheckpoint"),
    "comm": ("counting",),
    "fitting": ("fit",),
    "group": ("CpGroup", "init_cp_group"),
    "gradients": ("clip_grad_norm", "grad_scaler", "reduce_gradients", "sum_gradients"),
    "host_adamw": ("HostAdamW",),
    "loss": ("count_tokens", "cp_loss", "total"),
    "overflow": ("first_nonfinite",),
    "patch": ("patch_for_cp", "patch_llama", "patch_qwen2", "patch_qwen3", "unpatch"),
    "planning": ("longest", "plan", "predict"),
    "prepared": ("Prepared",),
    "preparing": ("make_optimizer", "prepare", "shape_of", "unprepare"),
    "sharding": ("Shard", "gather", "shard_batch"),
    "step": ("Choice", "Shape", "Work"),
    "tiling": ("tile", "untile"),
    "tiled_loss": ("tiled_cross_entropy",),
    "tiled_ffn": ("tiled_mlp",),
    "tiled_norm": ("tiled_rms_norm",),
    "trainer": ("CpTrainer", "CpTrainerMixin"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Choice",
    "CpGroup",
    "CpTrainer",
    "CpTrainerMixin",
    "HostAdamW",
    "Prepared",
    "RingAttention",
    "Shape",
    "Shard",
    "UlyssesAttention",
    "Work",
    "attend",
    "checkpoint_layers",
    "clip_grad_norm",
    "count_tokens",
    "counting",
    "cp_loss",
    "first_nonfinite",
    "fit",
    "gather",
    "grad_scaler",
    "init_cp_group",
    "longest",
    "make_optimizer",
    "patch_for_cp",
    "patch_llama",
    "patch_qwen2",
    "patch_qwen3",
    "plan",
    "predict",
    "prepare",
    "reduce_gradients",
    "shape_of",
    "shard_batch",
    "sum_gradients",
    "tile",
    "tiled_cross_entropy",
    "tiled_mlp",
    "tiled_rms_norm",
    "total",
    "uncheckpoint",
    "unpatch",
    "unprepare",
    "untile",
]


def __getattr__(name: str) -> object:
    """Import what `name` lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cp_volta' has no attribute {name!r}; there are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"cp_volta.{_HOME_OF[name]}"), name)
