"""Model presets as plain data. No torch here: suites are checked and costs estimated from these.

Figures of the public presets are those of the published configurations; `build` in `probes.models.build`
makes a real transformers model of one. The tiny presets are the same three classes with two layers, for a
CPU: their head counts exercise grouped queries, and their vocabulary holds every byte.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import msgspec

Family = Literal["qwen2", "qwen3", "llama"]


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that decide a model's shape and cost."""

    name: str
    family: Family
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rope_base: float
    norm_eps: float = 1e-6
    max_positions: int = 32_768
    llama3_rope: bool = False
    outliers: bool = False  # weights that make massive activations: probes.models.outliers

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices; norms and biases are left out (below 0.1 %)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: all layers and the head, not the embedding look-up."""
        return self.layers * self.layer_parameters + self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Stored weights, without norms and biases: a tied head is counted once."""
        return self.matmul_parameters + (0 if self.tied else self.hidden * self.vocab)


def train_flops(shape: Preset, batch: int, seq: int) -> float:
    """Floating-point operations of one forward and backward, as mathematics: recomputation not counted.

    Per token: 6 per matmul weight (2 forward, 4 backward), and 12 * heads * head_dim per layer and *seen*
    key, of which a causal mask leaves (seq + 1) / 2 on average.
    Source: PaLM, Chowdhery et al. 2022, appendix B, with the causal half counted.
    """
    attention = 12 * shape.layers * shape.heads * shape.head_dim * (seq + 1) / 2
    return float(batch * seq * (6 * shape.matmul_parameters + attention))


def _tiny(family: Family, heads: int, *, hidden: int, head_dim: int, tied: bool = True) -> Preset:
    return Preset(
        name=f"tiny-{family}-{heads}h",
        family=family,
        hidden=hidden,
        mlp=hidden * 3,
        layers=2,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        vocab=512,
        tied=tied,
        rope_base=5e5 if family == "llama" else 1e6,
        norm_eps=1e-5 if family == "llama" else 1e-6,
        max_positions=32_768,
    )


_QWEN2 = {"family": "qwen2", "head_dim": 128, "rope_base": 1e6, "vocab": 151_936, "tied": True}
_QWEN3 = {
    "family": "qwen3",
    "head_dim": 128,
    "rope_base": 1e6,
    "vocab": 151_936,
    "tied": True,
    "max_positions": 40_960,
}


def _preset(name: str, base: dict[str, object], **shape: object) -> Preset:
    return msgspec.convert({"name": name, **base, **shape}, Preset)


_ALL = (
    _preset("qwen2.5-0.5b", _QWEN2, hidden=896, mlp=4_864, layers=24, heads=14, kv_heads=2, head_dim=64),
    _preset("qwen2.5-1.5b", _QWEN2, hidden=1_536, mlp=8_960, layers=28, heads=12, kv_heads=2),
    _preset(
        "qwen2.5-7b",
        _QWEN2,
        hidden=3_584,
        mlp=18_944,
        layers=28,
        heads=28,
        kv_heads=4,
        vocab=152_064,
        tied=False,
    ),
    _preset("qwen3-0.6b", _QWEN3, hidden=1_024, mlp=3_072, layers=28, heads=16, kv_heads=8),
    _preset("qwen3-4b", _QWEN3, hidden=2_560, mlp=9_728, layers=36, heads=32, kv_heads=8),
    Preset(
        name="llama-3.2-1b",
        family="llama",
        hidden=2_048,
        mlp=8_192,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128_256,
        tied=True,
        rope_base=5e5,
        norm_eps=1e-5,
        max_positions=131_072,
        llama3_rope=True,
    ),
    _tiny("qwen2", 4, hidden=64, head_dim=16),
    _tiny("qwen2", 6, hidden=96, head_dim=16, tied=False),
    _tiny("qwen2", 12, hidden=96, head_dim=8),
    _tiny("qwen3", 4, hidden=64, head_dim=32),  # head_dim x heads is not hidden, as in the real ones
    _tiny("qwen3", 6, hidden=96, head_dim=32, tied=False),
    _tiny("qwen3", 12, hidden=96, head_dim=16),
    msgspec.structs.replace(_tiny("llama", 4, hidden=64, head_dim=16), llama3_rope=True),
    _tiny("llama", 6, hidden=96, head_dim=16, tied=False),
    _tiny("llama", 12, hidden=96, head_dim=8),
)

# The same shapes with weights as `probes.models.outliers` plants them.
_OUTLIERS = tuple(
    msgspec.structs.replace(preset, name=f"{preset.name}-outlier", outliers=True)
    for preset in _ALL
    if preset.name in ("tiny-qwen2-4h", "qwen2.5-0.5b", "qwen2.5-1.5b")
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (*_ALL, *_OUTLIERS)}


def is_path(model: str) -> bool:
    """Whether `model` names a checkpoint folder rather than a preset."""
    return "/" in model or model.startswith((".", "~"))


def checkpoint(model: str) -> Path:
    """The folder that `model` names. Raises ValueError unless it holds a config.json."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {model!r}: no checkpoint folder: {folder / 'config.json'} is not there")
    return folder


def check_name(model: str) -> None:
    """Raise ValueError unless `model` is a preset, or the path of a folder with a config.json."""
    if is_path(model):
        checkpoint(model)
    elif model not in PRESETS:
        near = difflib.get_close_matches(model, PRESETS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown model {model!r}.{hint} Presets: {', '.join(PRESETS)}; or a folder, with a slash"
        )


def shape_of(model: str) -> Preset | None:
    """The preset, or None for a checkpoint folder."""
    return PRESETS.get(model)
