"""One small module for each cause of silent eager execution, compiled and stepped so that the cause comes about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import tc_volta
from probes.dynamo_watch import Kind
from probes.silent_eager.ran import mark

_WIDTH = 8
_WITHOUT_CODE = "aot_eager"  # Dynamo decides before any code is generated
_STEPS_OVER_LIMIT = 12
_COUNTED = "no reason logged"  # of a graph without any CUDA tensor Inductor counts the skip, and says nothing


class Plain(nn.Module):
    """A linear layer and a ReLU; `extra`, an int that forward reads, becomes a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.extra = 0

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        y: Tensor = torch.relu(self.linear(x)) + self.extra
        return y


class Disabled(Plain):
    """Part of the forward is kept from the compiler by whoever wrote it."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        y: Tensor = self.normed(self.linear(x))
        return y.relu()

    @torch.compiler.disable
    def normed(self, x: Tensor) -> Tensor:
        """The part."""
        y: Tensor = x / x.norm()
        return y


class Unsupported(Plain):
    """A graph break in a loop: Dynamo cannot go on in the middle of one, and gives up the whole frame."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        for _ in range(2):
            x = self.linear(x)
            torch._dynamo.graph_break()
        return x


class FromCpu(Plain):
    """Adds a tensor that lies on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = [torch.ones(())]  # in a list: it stays where it is

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        return super().forward(x) * self.offset[0].cos()


class Mutating(Plain):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        x.add_(1.0)
        return super().forward(x)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A compiled module, one step of it, what must be noticed, and where this file provokes it."""

    kind: Kind | None  # None: that nothing compiled ran is all there is to notice
    word: str  # in the reason
    model: nn.Module
    step: Callable[[], Any]
    steps: int = 3
    cudagraphs: bool = False
    note: str = ""


@contextlib.contextmanager
def provoked(cause: str, device: str) -> Iterator[Scenario]:
    """The scenario of a cause other than "none"; the process-wide settings that it needs hold inside."""
    with contextlib.ExitStack() as stack:
        made = _CAUSES[cause](device, stack)
        mark([made.model])
        yield made


def _limit(name: str, stack: contextlib.ExitStack, **limits: Any) -> Scenario:
    stack.enter_context(torch._dynamo.config.patch(**limits))
    model = Plain()
    model.compile(backend=_WITHOUT_CODE)

    def step() -> None:
        model.extra += 1
        _train(model, torch.ones(2, _WIDTH))

    return Scenario(
        kind="recompile limit", word=f"config.{name}", model=model, step=step, steps=_STEPS_OVER_LIMIT
    )


def _compiled(model: nn.Module, kind: Kind | None, word: str, **how: Any) -> Scenario:
    model.compile(**{"backend": _WITHOUT_CODE, **how})
    return Scenario(kind=kind, word=word, model=model, step=lambda: _train(model, torch.ones(2, _WIDTH)))


def _fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("this backend fails on every graph")


def _suppressed(device: str, stack: contextlib.ExitStack) -> Scenario:
    stack.enter_context(torch._dynamo.config.patch(suppress_errors=True))
    return _compiled(Plain(), "suppressed error", "this backend fails", backend=_fails)


def _fallback(device: str, stack: contextlib.ExitStack) -> Scenario:
    name = "silent_eager_fails"
    if name not in torch._dynamo.list_backends(None):
        torch._dynamo.register_backend(_fails, name=name)
    model = tc_volta.compile(Plain(), backend=name)
    step = lambda: _train(model, torch.ones(2, _WIDTH))  # noqa: E731
    return Scenario(kind="backend", word="this backend fails", model=model, step=step)


def _nothing(device: str, stack: contextlib.ExitStack) -> Scenario:
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    return _compiled(Plain(), None, "nothing ran compiled")


def _bf16(device: str, stack: contextlib.ExitStack) -> Scenario:
    note = ""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        from torch._dynamo.device_interface import CudaInterface

        stack.enter_context(mock.patch.object(CudaInterface, "is_bf16_supported", staticmethod(_not_native)))
        note = "this card has bfloat16: Inductor's gate was told that it has not"
    model = Plain().to(device, torch.bfloat16)
    model.compile()
    x = torch.ones(2, _WIDTH, device=device, dtype=torch.bfloat16)
    return Scenario(
        kind="bf16 skip", word="BF16", model=model, step=lambda: _train(model, x.clone()), note=note
    )


def _not_native(including_emulation: bool = True) -> bool:
    return including_emulation


def _graphs(model: nn.Module, word: str, device: str, *, dynamic: bool = False, **options: Any) -> Scenario:
    """Whole graphs only: newer torch cuts out what cannot be recorded, and records the rest."""
    if "graph_partition" in torch._inductor.list_options():
        options["graph_partition"] = False
    model.to(device).compile(dynamic=dynamic, options={"triton.cudagraphs": True, **options})
    sizes = iter(range(2, 100))

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        _train(model, torch.ones(next(sizes) if dynamic else 2, _WIDTH, device=device))

    return Scenario(kind="cudagraphs", word=word, model=model, step=step, steps=4, cudagraphs=True)


def _train(model: nn.Module, x: Tensor) -> None:
    model(x).float().sum().backward()
    model.zero_grad(set_to_none=True)


_CAUSES: dict[str, Callable[[str, contextlib.ExitStack], Scenario]] = {
    "recompile-limit": lambda device, stack: _limit("recompile_limit", stack, recompile_limit=8),
    "accumulated-limit": lambda device, stack: _limit(
        "accumulated_recompile_limit", stack, recompile_limit=100, accumulated_recompile_limit=4
    ),
    "disabled-function": lambda device, stack: _compiled(Disabled(), "graph break", "torch.compiler.disable"),
    "skipfile": lambda device, stack: _compiled(
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH)), "skipped frame", "skipfiles"
    ),
    "unsupported-frame": lambda device, stack: _compiled(Unsupported(), "skipped frame", "graph_break"),
    "suppressed-error": _suppressed,
    "backend-fallback": _fallback,
    "bf16": _bf16,
    "cudagraphs-cpu-tensor": lambda device, stack: _graphs(
        FromCpu(), "cpu device" if device == "cuda" else _COUNTED, device
    ),
    "cudagraphs-mutation": lambda device, stack: _graphs(Mutating(), "mutated inputs", device),
    "cudagraphs-dynamic": lambda device, stack: _graphs(
        Plain(), "symbolic shapes", device, dynamic=True, **{"triton.cudagraph_skip_dynamic_graphs": True}
    ),
    "nothing-compiled": _nothing,
}
