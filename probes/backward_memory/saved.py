"""What autograd keeps for the backward: every storage once, by the module whose forward kept it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.module_tracker import ModuleTracker

from probes.step_memory import held, peak


@dataclass
class Saved:
    """Filled while the block runs. Parameters and inputs, which are there anyway, are not in it."""

    by_module: collections.Counter[str] = field(default_factory=collections.Counter)  # bytes
    shapes: dict[str, collections.Counter[str]] = field(
        default_factory=dict
    )  # module -> "[1, 64] float32" -> how many
    _seen: set[int] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(self.by_module.values())

    def lines(self, most: int = 4) -> list[str]:
        """The modules that keep most, and what."""
        found = []
        for name, size in self.by_module.most_common(most):
            what = ", ".join(f"{n} of {shape}" for shape, n in self.shapes[name].most_common(3))
            found.append(f"{name}: {size / 2**20:.2f} MiB ({what})")
        return found


@contextlib.contextmanager
def saving(model: nn.Module, *there: Tensor) -> Iterator[Saved]:
    """What autograd keeps of what runs inside; `there`: tensors that are no one's to keep, as inputs."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *there)}
    found = Saved()

    def pack(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where in known or where in found._seen:
            return tensor
        found._seen.add(where)
        name = _innermost(tracker.parents)
        found.by_module[name] += tensor.untyped_storage().nbytes()
        words = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        found.shapes.setdefault(name, collections.Counter())[words] += 1
        return tensor

    with ModuleTracker() as tracker, torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield found


def _innermost(parents: set[str]) -> str:
    """Of the modules whose forward runs, the deepest; layers of one stack are one."""
    name = max(parents, key=lambda one: (one.count("."), one))
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@contextlib.contextmanager
def peak_above(device: str) -> Iterator[list[int]]:
    """A list of one: how far memory rose above what was held at first. Allocated bytes, insides of operators included."""
    found = [0]
    if device == "cuda":
        before = held(device)
        with peak(device) as most:
            yield found
            torch.cuda.synchronize()
        found[0] = (most[0] or before) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield found
    result = seen.profiler.kineto_results if seen.profiler else None  # no public way to single allocations
    events = [e for e in result.events() if e.name() == "[memory]"] if result else []
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    found[0] = max(itertools.accumulate(sizes), default=0)
