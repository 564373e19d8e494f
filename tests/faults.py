"""A backend for torch.compile that is wrong on purpose, one named fault at a time.

The graph is compiled once, by an honest backend; around it, each parameter passes through an identity whose backward
may spoil the gradient, and outputs may be spoiled on their way out. So the faults are those of a compiler: they
appear in `.grad` and in what the module returns, and eager and the reference never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probes.models import PRESETS, Preset
from probes.models.build import config_of
from probes.text import tokens

Spoil = Callable[[Tensor, "Faulty"], Tensor | None]
HEADS, HEAD_DIM, SEQ, LONG = 4, 16, 12, 24
EMBED, NORM, DOWN, Q, HEAD = (
    "embed_tokens",
    "layers.0.input_layernorm",
    "layers.1.mlp.down_proj",
    "layers.0.self_attn.q_proj.weight",
    "layers.1.self_attn.q_proj.weight",
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """target: part of a parameter's name, "logits" or "loss"; from_seq: only in batches at least this long."""

    target: str
    spoil: Spoil
    from_seq: int = 0
    from_call: int = 0


class Faulty:
    """The backend, and the fault that is active. `calls` counts forwards since `begin`."""

    def __init__(self, inner: str = "aot_eager_decomp_partition") -> None:
        self.inner = inner
        self.fault: Fault | None = None
        self.calls = 0
        self.seq = 0
        self.before: dict[str, Tensor] = {}

    def begin(self, fault: Fault | None) -> None:
        self.fault, self.calls, self.before = fault, 0, {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names = [_name(n) for n in graph.graph.nodes if n.op == "placeholder"]
        honest = torch._dynamo.lookup_backend(self.inner)(graph, inputs)

        def run(*arguments: Any) -> tuple[Any, ...]:
            self.calls += 1
            passed = [
                _Identity.apply(a, self, name) if isinstance(a, Tensor) and a.requires_grad else a
                for a, name in zip(arguments, names, strict=True)
            ]
            self.seq = max(
                (a.shape[-1] for a in arguments if isinstance(a, Tensor) and a.dtype == torch.int64),
                default=0,
            )
            return tuple(self.output(o) for o in honest(*passed))

        return run

    def output(self, tensor: Any) -> Any:
        target = "loss" if isinstance(tensor, Tensor) and tensor.dim() == 0 else "logits"
        return self._spoiled(target, tensor) if isinstance(tensor, Tensor) else tensor

    def gradient(self, name: str, grad: Tensor) -> Tensor | None:
        spoiled = self._spoiled(name, grad)
        self.before[name] = grad.clone()
        return spoiled

    def _spoiled(self, name: str, tensor: Tensor) -> Tensor | None:
        fault = self.fault
        if (
            fault is None
            or fault.target not in name
            or self.seq < fault.from_seq
            or self.calls < fault.from_call
        ):
            return tensor
        self.name = name
        return fault.spoil(tensor, self)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faulty: Faulty, name: str) -> Tensor:  # type: ignore[override]
        ctx.faulty, ctx.name = faulty, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        return ctx.faulty.gradient(ctx.name, grad), None, None


def _name(node: torch.fx.Node) -> str:
    """ "l_self_modules_model_modules_layers_modules_0_…_parameters_weight_" as "model.layers.0.….weight"."""
    words = str(node.target).strip("_").lower()
    for filler in ("l_self_", "modules_", "parameters_", "buffers_"):
        words = words.replace(filler, ".")
    words = words.replace("_.", ".").replace("..", ".")
    return words.strip(".")


class SmallLM(nn.Module):
    """A causal LM of transformers; returns (logits, loss)."""

    def __init__(self, dtype: torch.dtype, preset: Preset = PRESETS["tiny-qwen2-4h"]) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.lm = AutoModelForCausalLM.from_config(
            config_of(preset), dtype=dtype, attn_implementation="eager"
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.lm(input_ids=ids, labels=ids, use_cache=False)
        return out.logits, out.loss


def batches(count: int, seq: int = SEQ, seed: int = 0) -> list[tuple[Tensor]]:
    ids = tokens(count + seed, seq, "cpu")[seed:]
    return [(row[None].clone(),) for row in ids]


def _set(value: float, at: int = 5) -> Spoil:
    def spoil(x: Tensor, _: Faulty) -> Tensor:
        y = x.clone()
        y.view(-1)[at] = value
        return y

    return spoil


def _one_off(x: Tensor, _: Faulty) -> Tensor:
    y = x.clone()
    y.view(-1)[5] += 3 * x.float().square().mean().sqrt().to(x.dtype)
    return y


def _swapped(x: Tensor, _: Faulty) -> Tensor:
    y = x.clone()
    y[:HEAD_DIM], y[HEAD_DIM : 2 * HEAD_DIM] = x[HEAD_DIM : 2 * HEAD_DIM], x[:HEAD_DIM]
    return y


def _part(x: Tensor, _: Faulty) -> Tensor:
    y = x.clone()
    y[-1] = 0
    return y


def _last_tile(x: Tensor, _: Faulty) -> Tensor:
    y = x.clone()
    y[:, -1:] = y[:, -2:-1]
    return y


def _three_bits(x: Tensor, _: Faulty) -> Tensor:
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(x.dtype)


def times(factor: float) -> Spoil:
    return lambda x, _: x * factor


FAULTS: dict[str, Fault] = {
    "all of one gradient zeroed": Fault(target=DOWN, spoil=times(0.0)),
    "every gradient zeroed": Fault(target=".weight", spoil=times(0.0)),
    "gradient 1.01 times too large": Fault(target=DOWN, spoil=times(1.01)),
    "gradient twice too large": Fault(target=DOWN, spoil=times(2.0)),
    "gradient five times too large": Fault(target=DOWN, spoil=times(5.0)),
    "every gradient five times too large": Fault(target=".weight", spoil=times(5.0)),
    "gradient halved": Fault(target=EMBED, spoil=times(0.5)),
    "sign of a gradient turned": Fault(target=DOWN, spoil=times(-1.0)),
    "sign of every gradient turned": Fault(target=".weight", spoil=times(-1.0)),
    "a gradient missing": Fault(target=Q, spoil=lambda x, _: None),
    "gradient of a small-gradient layer zeroed": Fault(target=Q, spoil=times(0.0)),
    "gradient shifted by one row": Fault(target=DOWN, spoil=lambda x, _: x.roll(1, 0)),
    "gradient of the step before": Fault(target=DOWN, spoil=lambda x, f: f.before.get(f.name, x)),
    "gradients of two steps added up": Fault(target=DOWN, spoil=lambda x, f: x + f.before.get(f.name, 0 * x)),
    "one element of a gradient off": Fault(target=DOWN, spoil=_one_off),
    "one element of the embedding's gradient off": Fault(target=EMBED, spoil=_one_off),
    "last row of a gradient left out": Fault(target=HEAD, spoil=_part),
    "gradients of two heads swapped": Fault(target=HEAD, spoil=_swapped),
    "gradient transposed": Fault(target="layers.1.self_attn.o_proj", spoil=lambda x, _: x.t().contiguous()),
    "gradient of a norm averaged over it": Fault(target=NORM, spoil=lambda x, _: x.mean().expand_as(x)),
    "gradient rounded to 3 bits": Fault(target=DOWN, spoil=_three_bits),
    "NaN in a gradient": Fault(target=DOWN, spoil=_set(float("nan"))),
    "infinity in a gradient": Fault(target=DOWN, spoil=_set(float("inf"))),
    "all of a gradient NaN": Fault(target=NORM, spoil=times(float("nan"))),
    "NaN in the logits": Fault(target="logits", spoil=_set(float("nan"))),
    "minus infinity in the logits": Fault(target="logits", spoil=_set(float("-inf"))),
    "logits of another dtype": Fault(target="logits", spoil=lambda x, _: x.double()),
    "logits of a broadcast shape": Fault(target="logits", spoil=lambda x, _: x[:, :1]),
    "logits shifted by one position": Fault(target="logits", spoil=lambda x, _: x.roll(1, 1)),
    "last position of the logits a copy": Fault(target="logits", spoil=_last_tile),
    "one logit off": Fault(target="logits", spoil=_one_off),
    "loss off by 0.5 %": Fault(target="loss", spoil=times(1.005)),
    "loss of shape (1,)": Fault(target="loss", spoil=lambda x, _: x[None]),
    "gradient wrong from a certain length on": Fault(target=DOWN, spoil=times(2.0), from_seq=LONG),
    "gradient wrong from the second call on": Fault(target=DOWN, spoil=times(2.0), from_call=2),
    "logits wrong from the second call on": Fault(
        target="logits", spoil=lambda x, _: x.roll(1, 1), from_call=2
    ),
}
REMOVED = (
    "minus infinities of the logits removed"  # the one fault in which reference and eager are not finite
)
