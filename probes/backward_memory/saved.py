"""What autograd saves for backward, by `torch.autograd.graph.saved_tensors_hooks`: exactly, and with a name.

Eager: the module that runs and the line that called the operator. Compiled: the node of Inductor's graph that made
the tensor, with its line; a compiled function saves all at once, so no line of Python would tell them apart.
Layers under activation checkpointing save nothing here: the checkpoint holds their inputs by itself.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Kind = tuple[tuple[int, ...], torch.dtype]
_TORCH = str(Path(torch.__file__).parent)


@dataclass(kw_only=True)
class Saved:
    """By the address of their storage, so that views of one tensor count once."""

    bytes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Parameters and the batch, which are held anyway, are not among them."""
        return sum(self.bytes.values())


@dataclass
class Graphs:
    """Names of what compiled forwards save, as Inductor's passes saw them; `look` is such a pass."""

    saved: dict[Kind, list[str]] = field(default_factory=dict)

    def look(self, graph: torch.fx.Graph) -> None:
        """For the Inductor option `post_grad_custom_post_pass`; changes nothing."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        for node in output.args[0]:  # type: ignore[union-attr]
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, Tensor) and node.op != "placeholder":  # type: ignore[union-attr]
                names = self.saved.setdefault((tuple(map(int, value.shape)), value.dtype), [])
                if (name := _node_name(node)) not in names:
                    names.append(name)

    def name_of(self, tensor: Tensor) -> str:
        """The nodes that may have made it: those of its shape and dtype."""
        return " or ".join(self.saved.get((tuple(tensor.shape), tensor.dtype), [])[:3])


@contextlib.contextmanager
def saving(model: nn.Module, held: set[int], graphs: Graphs | None) -> Iterator[Saved]:
    """Note what a forward inside saves. held: addresses of storages that live anyway.

    graphs: of the compiled model; None: it runs eagerly, and hooks on its modules tell which one is running.
    """
    found = Saved()
    running: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in held and address not in found.bytes and tensor.untyped_storage().nbytes():
            found.bytes[address] = tensor.untyped_storage().nbytes()
            graph = graphs.name_of(tensor) if graphs else ""
            found.names[address] = f"{graph or _place(running)} {described(tensor)}"
        return tensor

    with contextlib.ExitStack() as stack:
        if graphs is None:
            stack.enter_context(_tracking(model, running))
        stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        yield found


def described(tensor: Tensor) -> str:
    """Shape and dtype: "[1, 512, 64] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@contextlib.contextmanager
def _tracking(model: nn.Module, running: list[str]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        enter: Any = lambda _m, _args, name=name: running.append(name)  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(lambda *_: _leave(running), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(running: list[str]) -> None:
    running.pop()


def _place(running: list[str]) -> str:
    """The innermost running module, and the line outside of torch that called the operator."""
    module = running[-1] if running else ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "autograd"
    return f"{module} ({line})" if module else line


def _node_name(node: torch.fx.Node) -> str:
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    return f"{node.name}{where}"
