"""Checkpoints that wait in host memory: copied out while the next layer computes, and back before it is needed.

On CUDA one stream of its own does both directions, in order. Two copies out may be under way; a third waits, so that
device memory stays bounded however far the host runs ahead. In backward, the checkpoint of the layer below is
fetched while a layer is computed. On a CPU the same, by plain copies.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_volta.host_memory import HostMemory

IN_FLIGHT = 2


@dataclass(eq=False)
class Stored:
    """One tensor. `resident`: on the device still; `chunks`: on the host; `coming`: on its way back."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    resident: Tensor | None = None
    chunks: list[Tensor] | None = None
    left: torch.cuda.Event | None = None
    coming: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    below: weakref.ref[Stored] | None = None


class Offloader:
    """Takes tensors to the host and brings them back; keeps on the device, and counts, what the limit forbids."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self.leaving: deque[Stored] = deque()
        self.last: weakref.ref[Stored] | None = None
        self.stream: torch.cuda.Stream | None = None
        self.offloaded = 0  # tensors, over all steps
        self.kept = 0

    def store(self, tensor: Tensor) -> Stored:
        """Begin to copy `tensor` out. It must not be written to afterwards."""
        tensor = tensor.detach().contiguous()
        stored = Stored(tensor.shape, tensor.dtype, tensor.device, resident=tensor, below=self.last)
        self.last = weakref.ref(stored)
        stored.chunks = self.host.take(tensor.numel() * tensor.itemsize)
        if stored.chunks is None:
            self.kept += 1
            return stored
        weakref.finalize(stored, self.host.give_back, stored.chunks).atexit = False
        self.offloaded += 1
        self._copy_out(stored, tensor)
        return stored

    def load(self, stored: Stored) -> Tensor:
        """The tensor, ready for the current stream; and begin to fetch the one stored before it."""
        tensor = stored.resident
        if tensor is not None and stored in self.leaving:
            self.leaving.remove(stored)
            self._let_go(stored)
        if tensor is None:
            self._fetch(stored)
            tensor, stored.coming = stored.coming, None
            assert tensor is not None
            if stored.arrived is not None:
                torch.cuda.current_stream(stored.device).wait_event(stored.arrived)
        below = stored.below() if stored.below is not None else None
        if below is not None and below.resident is None:
            self._fetch(below)
        return tensor

    def _copy_out(self, stored: Stored, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            _copy(tensor, stored, out=True)
            stored.resident = None
            return
        while len(self.leaving) >= IN_FLIGHT:
            self._let_go(self.leaving.popleft())
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            _copy(tensor, stored, out=True)
            stored.left = stream.record_event()
        self.leaving.append(stored)

    def _let_go(self, stored: Stored) -> None:
        """Drop the device's copy. What reuses its memory comes later on a stream that waited for the copy."""
        assert stored.left is not None
        torch.cuda.current_stream(stored.device).wait_event(stored.left)
        stored.resident = None

    def _fetch(self, stored: Stored) -> None:
        if stored.coming is not None:
            return
        stored.coming = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        if stored.device.type != "cuda":
            _copy(stored.coming, stored, out=False)
            return
        stream = self._stream(stored.device)
        stream.wait_stream(
            torch.cuda.current_stream(stored.device)
        )  # the new memory may be in use until then
        with torch.cuda.stream(stream):
            _copy(stored.coming, stored, out=False)
            stored.arrived = stream.record_event()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        return self.stream


def _copy(tensor: Tensor, stored: Stored, *, out: bool) -> None:
    """Bytes between a device tensor and its chunks, on the current stream."""
    assert stored.chunks is not None
    flat = tensor.view(-1).view(torch.uint8)
    step = stored.chunks[0].numel() if stored.chunks else 1
    for chunk, piece in zip(stored.chunks, flat.split(step), strict=True):
        host = chunk[: piece.numel()]
        if out:
            host.copy_(piece, non_blocking=True)
        else:
            piece.copy_(host, non_blocking=True)
