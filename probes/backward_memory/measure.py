"""One step, watched: its peak, what lived then, what it saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from probes.backward_memory.ledger import Block, Event, Peak, last_at, peak_of
from probes.backward_memory.record import recorded
from probes.backward_memory.saved import Graphs, Saved, described, saving
from probes.step_memory import wait
from probes.train_step.memory import release
from probes.train_step.training import Training


@dataclass(frozen=True, kw_only=True)
class Side:
    """held: before the step: parameters, buffers, batch. peak: above it."""

    held_bytes: int
    peak_bytes: int
    explained_bytes: int  # of the peak, by the recorded allocations
    saved_bytes: int
    saved_tensors: int
    blocks: tuple[Block, ...]

    @property
    def total_bytes(self) -> int:
        return self.held_bytes + self.peak_bytes


def measure(training: Training, folder: Path, graphs: Graphs | None) -> Side:
    """Two steps first, so that what is compiled, tuned or cached is; then the peak, and then a step in records.

    On CUDA the peak is read in a step without records, which take no device memory, but time.
    """
    training.step()
    training.step()
    training.model.zero_grad(set_to_none=True)
    release()
    held = _storages(training)
    wait(training.device)
    before, peak = _cuda_peak(training) if training.device == "cuda" else (sum(held.values()), None)
    training.model.zero_grad(set_to_none=True)
    watched = _Watched(training, set(held), graphs)
    events = recorded(watched.step, training.device, folder)
    ledger = peak_of(events)
    return Side(
        held_bytes=before,
        peak_bytes=ledger.bytes if peak is None else peak,
        explained_bytes=ledger.bytes,
        saved_bytes=watched.saved.total_bytes,
        saved_tensors=len(watched.saved.bytes),
        blocks=watched.blocks(events, ledger),
    )


class _Watched:
    """A step that notes what it saves, and where its forward ended."""

    def __init__(self, training: Training, held: set[int], graphs: Graphs | None) -> None:
        self.training, self.held, self.graphs = training, held, graphs
        self.saved = Saved()
        self.mark: Tensor | None = None

    def step(self) -> None:
        """Forward and backward, without an optimizer."""
        training = self.training
        if training.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        with saving(training.model, self.held, self.graphs) as self.saved:
            loss = training.loss(training.model)
        self.mark = torch.empty(1, device=training.device)  # its allocation parts forward from backward
        training.scaler.scale(loss).backward()

    def blocks(self, events: Sequence[Event], peak: Peak) -> tuple[Block, ...]:
        """What lived at the peak, with names."""
        assert self.mark is not None
        last = last_at(events)
        forward_end = last[self.mark.data_ptr()]
        gradients = {
            last.get(p.grad.untyped_storage().data_ptr()): f"{name} {described(p.grad)}"
            for name, p in self.training.model.named_parameters()
            if p.grad is not None
        }
        blocks = []
        for at in peak.live:
            event = events[at]
            kind, name = "temporary", event.where
            if at < forward_end and event.address in self.saved.names:
                kind, name = "saved", self.saved.names[event.address]
            elif at in gradients:
                kind, name = "gradient", gradients[at]
            elif (width := event.bytes / _logits(self.training)) in (2, 4):
                kind, name = "logits", f"{event.where} [B, S, vocab] in {int(width)} bytes each"
            blocks.append(Block(bytes=event.bytes, kind=kind, name=name))
        return tuple(blocks)


def _cuda_peak(training: Training) -> tuple[int, int]:
    """What was allocated before, and the step's peak above it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    return before, torch.cuda.max_memory_allocated() - before


def _storages(training: Training) -> dict[int, int]:
    """Address -> bytes of what lives before and after the step."""
    tensors = [*training.model.parameters(), *training.model.buffers(), training.ids_BS]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _logits(training: Training) -> int:
    """Elements of the logits of all tokens."""
    vocab: int = training.model.config.vocab_size
    return training.ids_BS.numel() * vocab
