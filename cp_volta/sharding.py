"""From a batch to what one rank feeds its model, and back.

Labels are shifted before the sequence is dealt out: shifted afterwards, each shard would lose the label at its border.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_volta.group import CpGroup
from tc_volta.errors import Unsupported

KEYS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "cu_seqlens")
IGNORED = -100


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a batch.

    inputs: what the patched model takes: input_ids [B, s], position_ids [B, s] and, for packed documents or padding
    that is not at the end, documents [B, S] of the whole sequence.
    labels [B, s]: of each token the next one, IGNORED where there is none; None where the batch has no labels.
    seq: the batch's length before it was padded to `cp.divisor`.
    """

    inputs: dict[str, Tensor]
    labels: Tensor | None
    seq: int

    def with_labels(self, tokens: int) -> dict[str, Any]:
        """The inputs, and what makes a model answer with this rank's part of the loss (`total` adds the parts up).

        tokens: what its sum is divided by, `count_tokens`. Raises ValueError for a batch without labels.
        """
        if self.labels is None:
            raise ValueError("the batch has no labels: there is no loss to take")
        loss = {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": max(tokens, 1)}
        return {**self.inputs, **loss}


def shard_batch(
    batch: Mapping[str, Tensor], cp: CpGroup, *, pad_token_id: int = 0, check: bool = True
) -> Shard:
    """One rank's part of a batch that all ranks of its cp group hold whole.

    batch: input_ids [B, S] and, where wanted, labels [B, S] as transformers has them (not shifted) or shift_labels
    (shifted), attention_mask [B, S] of 0 and 1, position_ids [B, S] or [1, S] that start anew with each packed
    document, or cu_seqlens [n + 1] (B = 1) in their place. Labels of masked tokens are ignored.
    check: compare the batch with the other ranks' (one collective, which waits for the device of the batch); a sampler
    that counts cp ranks as data-parallel ones gives each another batch, and trains on nonsense without a word.
    Raises ValueError or Unsupported; where check is on, on every rank of the group.
    """
    ids = _input_ids(batch)
    if check:
        _same_everywhere(ids, cp)
    labels, mask = _labels(batch, ids), _mask(batch, ids)
    positions, documents = _positions(batch, ids)
    if mask is not None:
        if labels is not None:
            following = F.pad(mask[:, 1:], (0, 1), value=False)  # the label of t is the token t + 1
            labels = labels.masked_fill(~(mask & following), IGNORED)
        if not _at_the_end(mask):
            kept = torch.zeros_like(ids) if documents is None else documents
            documents = torch.where(mask, kept, -1)
    seq = ids.shape[1]
    short = -seq % cp.divisor
    held = cp.positions(seq + short).to(ids.device)
    inputs = {
        "input_ids": F.pad(ids, (0, short), value=pad_token_id)[:, held],
        "position_ids": _go_on(positions, short)[:, held],
    }
    if documents is not None:
        inputs["documents"] = F.pad(documents, (0, short), value=-1)
    if labels is not None:
        labels = F.pad(labels, (0, short), value=IGNORED)[:, held]
    return Shard(inputs, labels, seq)


def gather(x: Tensor, cp: CpGroup, seq: int | None = None) -> Tensor:
    """The whole sequence, in its order, on every rank: x [B, s, ...] -> [B, seq, ...]. For looking, not for training.

    seq: the length before padding, `Shard.seq`; None keeps the padding. The result has no gradient.
    """
    mine = x.detach().transpose(0, 1).contiguous()
    parts = mine.new_empty((cp.size, *mine.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), mine, group=cp.group)
    length = mine.shape[0] * cp.size
    order = torch.cat([cp.positions(length, rank) for rank in range(cp.size)]).to(x.device)
    whole = torch.empty_like(parts.flatten(0, 1))
    whole[order] = parts.flatten(0, 1)
    return whole[: length if seq is None else seq].transpose(0, 1)


def _input_ids(batch: Mapping[str, Tensor]) -> Tensor:
    for name in batch:
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            hint = f"; nearest is {near[0]}" if near else ""
            raise Unsupported(f"shard_batch does not know {name}{hint}. It takes {', '.join(KEYS)}")
    ids = batch.get("input_ids")
    if ids is None or ids.ndim != 2 or 0 in ids.shape:
        found = "none" if ids is None else str(list(ids.shape))
        raise ValueError(f"a batch needs input_ids [B, S]; got {found}")
    return ids


def _labels(batch: Mapping[str, Tensor], ids: Tensor) -> Tensor | None:
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    for given in (labels, shifted):
        if given is not None and given.shape != ids.shape:
            raise ValueError(f"labels are {list(given.shape)}, input_ids {list(ids.shape)}")
    if shifted is not None:
        return shifted
    return None if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _mask(batch: Mapping[str, Tensor], ids: Tensor) -> Tensor | None:
    """The mask as bool, or None where nothing is masked."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise Unsupported(
            f"attention_mask is {list(mask.shape)}; over several ranks a padding mask "
            f"[B, S] = {list(ids.shape)} can be honoured, no other"
        )
    mask = mask.bool()
    return None if bool(mask.all()) else mask


def _at_the_end(mask: Tensor) -> bool:
    """Is all padding behind the last token? Causal attention does not look there."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _positions(batch: Mapping[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Position ids [B, S], and the document of each token [B, S] where there is more than one."""
    seq = ids.shape[1]
    plain = torch.arange(seq, device=ids.device)
    bounds, given = batch.get("cu_seqlens"), batch.get("position_ids")
    if bounds is not None and given is not None:
        raise ValueError("a batch has position_ids or cu_seqlens, not both")
    if bounds is not None:
        given = _restarting(bounds, ids)
    if given is None:
        return plain.expand(ids.shape), None
    if given.ndim != 2 or given.shape[1] != seq or given.shape[0] not in (1, ids.shape[0]):
        raise Unsupported(f"position_ids are {list(given.shape)}; supported is {list(ids.shape)}")
    given = given.expand(ids.shape)
    if bool((given == plain).all()):
        return given, None
    starts = given[:, 1:] != given[:, :-1] + 1
    return given, F.pad(starts.long().cumsum(1), (1, 0))


def _restarting(bounds: Tensor, ids: Tensor) -> Tensor:
    """Position ids [1, S] of documents that end where cu_seqlens says."""
    ends = bounds.to(ids.device, torch.long).flatten()
    rising = ends.numel() > 1 and bool((ends[1:] > ends[:-1]).all())
    if ids.shape[0] != 1 or not rising or int(ends[0]) or int(ends[-1]) != ids.shape[1]:
        raise ValueError(
            f"cu_seqlens rises from 0 to S = {ids.shape[1]} over a batch of 1; got {ends.tolist()[:8]} "
            f"over a batch of {ids.shape[0]}"
        )
    starts = ends[:-1].repeat_interleave(ends.diff())
    return (torch.arange(ids.shape[1], device=ids.device) - starts).unsqueeze(0)


def _go_on(positions: Tensor, short: int) -> Tensor:
    """The positions, going on into the padding."""
    more = positions[:, -1:] + torch.arange(1, short + 1, device=positions.device)
    return torch.cat((positions, more), dim=1)


def _same_everywhere(ids: Tensor, cp: CpGroup) -> None:
    """Raise ValueError, on every rank, where the ranks of the group hold different batches."""
    weights = torch.arange(1, ids.numel() + 1, device=ids.device)
    mark = torch.stack((ids.flatten().long() * weights, weights)).sum(1)
    mark = torch.cat((mark, mark.new_tensor(list(ids.shape))))
    if dist.get_backend(cp.group) == "nccl":
        mark = mark.cuda()
    low, high = mark.clone(), mark.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=cp.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=cp.group)
    if not torch.equal(low, high):
        ranks = dist.get_process_group_ranks(cp.group)
        raise ValueError(
            f"ranks {ranks} share a sequence but were given different batches; this rank's is {list(ids.shape)}. A "
            f"sampler has to count {cp.dp_size} data-parallel ranks (cp.dp_rank, cp.dp_size), not {cp.mesh.size()}"
        )
