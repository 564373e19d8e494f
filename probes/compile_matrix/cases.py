"""The modules of the matrix, each called as module(*batch) -> (output, loss), and their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from probes.compile_matrix import MatrixAxes
from probes.models.build import DTYPES, build, twin
from probes.text import tokens

_SMALL_LM = "tiny-qwen2-4h"
_HIDDEN = 64
_FP16_SCALE = 1024.0  # most gradients of a plain fp16 step underflow
Batch = tuple[Tensor, ...]


class Mlp(nn.Module):
    """Two linear layers with a ReLU between them and a squared error. x_BSH, target_BSH -> (y_BSH, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_HIDDEN, 3 * _HIDDEN)
        self.down = nn.Linear(3 * _HIDDEN, _HIDDEN)

    def forward(self, x_BSH: Tensor, target_BSH: Tensor) -> tuple[Tensor, Tensor]:
        y_BSH = self.down(torch.relu(self.up(x_BSH)))
        return y_BSH, (y_BSH.float() - target_BSH.float()).square().mean()


class Layer(nn.Module):
    """One decoder layer with its rotary embedding and a squared error. Shapes as of Mlp."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layer = model.model.layers[0]
        self.rotary = model.model.rotary_emb

    def forward(self, x_BSH: Tensor, target_BSH: Tensor) -> tuple[Tensor, Tensor]:
        positions_1S = torch.arange(x_BSH.shape[1], device=x_BSH.device)[None]
        rotated = self.rotary(x_BSH, positions_1S)
        y_BSH = self.layer(x_BSH, position_embeddings=rotated, position_ids=positions_1S)
        y_BSH = y_BSH[0] if isinstance(y_BSH, tuple) else y_BSH
        return y_BSH, (y_BSH.float() - target_BSH.float()).square().mean()


class Causal(nn.Module):
    """A causal LM of transformers. ids_BS -> (logits_BSV, loss)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        out = self.lm(input_ids=ids_BS, labels=ids_BS, use_cache=False)
        return out.logits, out.loss


def case(axes: MatrixAxes, device: str, seed: int) -> nn.Module:
    """The module that the axes name, random weights from `seed`, in training mode."""
    dtype = DTYPES[axes.dtype]
    if axes.model == "mlp":
        torch.manual_seed(seed)
        with torch.device(device):
            return Mlp().to(dtype)
    name = _SMALL_LM if axes.model in ("layer", "lm") else axes.model
    model = build(name, device=device, dtype=dtype, seed=seed)
    return Layer(model) if axes.model == "layer" else Causal(model)


def loss_scale(axes: MatrixAxes) -> float:
    """The factor on the loss in backward, the same for all sides of a cell."""
    return _FP16_SCALE if axes.dtype == "fp16" else 1.0


def widened(module: nn.Module) -> nn.Module:
    """The same weights in float64, attention written out; shares nothing with `module`."""
    if isinstance(module, Causal):
        return Causal(twin(module.lm, dtype=torch.float64))
    import copy

    wide = copy.deepcopy(module).double()
    if isinstance(wide, Layer):
        wide.layer.self_attn.config._attn_implementation = "sdpa"  # is causal without a mask; math in float64
    return wide


def batches(axes: MatrixAxes, count: int, device: str, seed: int, seq: int | None = None) -> list[Batch]:
    """`count` different batches; the floating input x requires a gradient, targets do not."""
    seq = seq or axes.seq
    if axes.model not in ("mlp", "layer"):
        ids = tokens(axes.batch * count, seq, device)
        return [(part,) for part in ids.split(axes.batch)]
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (axes.batch, seq, _HIDDEN)
    drawn = torch.randn(count, 2, *shape, generator=generator).to(device=device, dtype=DTYPES[axes.dtype])
    return [(pair[0].clone().requires_grad_(), pair[1].clone()) for pair in drawn]
