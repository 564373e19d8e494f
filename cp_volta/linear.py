"""A linear layer as tensors that an op can take, with or without a LoRA adapter, and its products tile by tile.

Legend: T rows of a tile, I inputs, O outputs, R rank of an adapter.
An op takes one list of tensors and one text that says what they are: each linear is "w", then "b" with a bias, then
"AB" with an adapter; linears are joined by commas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cp_volta.matmul import add_mm, sum_dtype


@dataclass(frozen=True, kw_only=True)
class Linear:
    """weight [O, I], bias [O]; adapter down A [R, I] and up B [O, R], whose product is added times `scale`."""

    weight: Tensor
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0

    def tensors(self) -> list[Tensor]:
        """What there is, in the order of `kind`."""
        return [t for t in (self.weight, self.bias, self.down, self.up) if t is not None]

    def kind(self) -> str:
        """Which of weight, bias and adapter there are."""
        return "w" + ("b" if self.bias is not None else "") + ("AB" if self.down is not None else "")


def linear_of(module: nn.Module, name: str) -> Linear:
    """The tensors of an nn.Linear, or of peft's LoRA layer around one, as they are now.

    Raises ValueError with the reason for any other: a quantised weight, dropout, DoRA, several adapters at once.
    """
    if type(module) is nn.Linear or type(module).__name__ == "FSDPLinear":
        return Linear(weight=module.weight, bias=module.bias)  # type: ignore[arg-type]
    base = getattr(module, "base_layer", None)
    if base is None or not hasattr(module, "lora_A"):
        raise ValueError(
            f"{name} is {type(module).__name__}: only nn.Linear, and peft's LoRA of one, can be tiled"
        )
    plain = linear_of(base, name)
    if module.disable_adapters or module.merged:
        return plain
    active = [a for a in module.active_adapters if a in module.lora_A]  # type: ignore[union-attr, operator]
    if not active:
        return plain
    if len(active) > 1:
        raise ValueError(f"{name} has {len(active)} active adapters ({', '.join(active)}); tiling takes one")
    _refuse_variants(module, active[0], name)
    return Linear(
        weight=plain.weight,
        bias=plain.bias,
        down=module.lora_A[active[0]].weight,  # type: ignore[index, union-attr, arg-type]
        up=module.lora_B[active[0]].weight,  # type: ignore[index, union-attr, arg-type]
        scale=float(module.scaling[active[0]]),  # type: ignore[index, arg-type]
    )


def _refuse_variants(module: nn.Module, adapter: str, name: str) -> None:
    dropout = getattr(module.lora_dropout[adapter], "p", 0.0)  # type: ignore[index]
    if dropout > 0:
        raise ValueError(f"{name}: lora_dropout {dropout}: a tile drawn twice would differ; use 0")
    if adapter in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(adapter):
        raise ValueError(f"{name}: a variant of LoRA (DoRA, …); tiling takes plain LoRA")
    if getattr(module.lora_B[adapter], "bias", None) is not None:  # type: ignore[index]
        raise ValueError(f"{name}: lora_bias; tiling takes adapters without a bias")


def pack(linears: Iterable[Linear]) -> tuple[list[Tensor], str, list[float]]:
    """(tensors, kinds, scales): what an op takes."""
    every = list(linears)
    tensors = [t for each in every for t in each.tensors()]
    if any(type(t).__name__ == "DTensor" for t in tensors):
        raise ValueError("a weight is sharded where it is used: give FSDP whole layers, not the parts of one")
    return tensors, ",".join(each.kind() for each in every), [each.scale for each in every]


def unpack(tensors: Sequence[Tensor], kinds: str, scales: Sequence[float]) -> list[Linear]:
    """The linears that `pack` took apart."""
    rest = iter(tensors)
    made = []
    for kind, scale in zip(kinds.split(","), scales, strict=True):
        named = {letter: next(rest) for letter in kind}
        down, up = named.get("A"), named.get("B")
        made.append(Linear(weight=named["w"], bias=named.get("b"), down=down, up=up, scale=scale))
    return made


class Grads:
    """Gradients of a list of tensors, summed over tiles; None for what is not asked for.

    One tile: a product in the compute dtype, as the untiled path has it. Several: a wide sum, rounded at the end.
    """

    def __init__(self, tensors: Sequence[Tensor], needed: Sequence[bool], tiles: int) -> None:
        self.tensors = tensors
        self.several = tiles > 1
        self.sums: list[Tensor | None] = [None] * len(tensors)
        self.place = {id(t): i for i, t in enumerate(tensors) if needed[i]}

    def wants(self, tensor: Tensor) -> bool:
        """Whether this tensor's gradient is asked for."""
        return id(tensor) in self.place

    def mm(self, tensor: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a @ b to the tensor's gradient."""
        if id(tensor) not in self.place:
            return
        at = self.place[id(tensor)]
        total = self.sums[at]
        if total is None and not self.several and a.dtype == tensor.dtype:
            self.sums[at] = torch.mm(a, b)
            return
        if total is None:
            total = self.sums[at] = torch.zeros_like(tensor, dtype=sum_dtype(tensor.dtype))
        add_mm(total, a, b)

    def rows(self, tensor: Tensor, values: Tensor) -> None:
        """Add the sum of `values` [T, O] over rows."""
        if id(tensor) not in self.place:
            return
        at = self.place[id(tensor)]
        total = values.sum(0, dtype=sum_dtype(tensor.dtype))
        before = self.sums[at]
        self.sums[at] = total if before is None else before.add_(total)

    def finish(self) -> list[Tensor]:
        """In each tensor's own dtype; an empty one where none was asked for."""
        made = []
        for i, tensor in enumerate(self.tensors):
            total, self.sums[i] = self.sums[i], None
            made.append(tensor.new_empty(0) if total is None else total.to(tensor.dtype))
        return made


class Products:
    """One linear's products of a tile, its weights cast once to the compute dtype."""

    def __init__(self, linear: Linear, compute: torch.dtype, adapter: torch.dtype) -> None:
        self.of = linear
        self.compute, self.adapter = compute, adapter
        self.weight = linear.weight.to(compute)
        self.bias = None if linear.bias is None else linear.bias.to(compute)
        self.down = None if linear.down is None else linear.down.to(adapter)
        self.up = None if linear.up is None else linear.up.to(adapter)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, O], in the compute dtype."""
        w_IO = self.weight.t()
        y_TO = torch.mm(x_TI, w_IO) if self.bias is None else torch.addmm(self.bias, x_TI, w_IO)
        if self.down is None or self.up is None:
            return y_TO
        mid_TR = torch.mm(x_TI.to(self.adapter), self.down.t())
        return (y_TO + torch.mm(mid_TR, self.up.t()) * self.of.scale).to(self.compute)

    def input_grad(self, dy_TO: Tensor, dx_TI: Tensor | None = None) -> Tensor:
        """dx [T, I], added to `dx_TI` in place where given."""
        dx_TI = torch.mm(dy_TO, self.weight) if dx_TI is None else dx_TI.addmm_(dy_TO, self.weight)
        if self.down is None or self.up is None:
            return dx_TI
        dmid_TR = torch.mm(dy_TO.to(self.adapter) * self.of.scale, self.up)
        return dx_TI.add_(torch.mm(dmid_TR, self.down))

    def weight_grads(self, dy_TO: Tensor, x_TI: Tensor, grads: Grads) -> None:
        """What this tile adds to the gradients of weight, bias and adapter."""
        grads.mm(self.of.weight, dy_TO.t(), x_TI)
        if self.of.bias is not None:
            grads.rows(self.of.bias, dy_TO)
        if self.of.down is None or self.of.up is None or self.down is None or self.up is None:
            return
        x, dy = x_TI.to(self.adapter), dy_TO.to(self.adapter) * self.of.scale
        grads.mm(self.of.up, dy.t(), torch.mm(x, self.down.t()))
        grads.mm(self.of.down, torch.mm(dy, self.up).t(), x)
