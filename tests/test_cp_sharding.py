"""What one rank gets of a batch: nothing lost, labels shifted first, documents and padding kept or refused."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_volta.group import CpGroup
from cp_volta.layout import divisor, positions
from cp_volta.sharding import IGNORED, Shard, shard_batch
from tc_volta.errors import Unsupported


class OneRank(NamedTuple):
    """A place in a group, without processes."""

    ring: int
    ulysses: int
    layout: str
    rank: int

    @property
    def divisor(self) -> int:
        return divisor(self.ring, self.ulysses, self.layout)

    def positions(self, seq: int, rank: int | None = None) -> Tensor:
        return positions(
            seq, self.ring, self.rank if rank is None else rank, self.layout, ulysses=self.ulysses
        )


def _shards(batch: dict[str, Tensor], ring: int, ulysses: int, layout: str) -> list[Shard]:
    ranks = [OneRank(ring, ulysses, layout, rank) for rank in range(ring * ulysses)]
    return [shard_batch(batch, cast(CpGroup, rank), check=False) for rank in ranks]


def _whole(shards: list[Shard], ring: int, ulysses: int, layout: str) -> dict[str, Tensor]:
    """The shards' tensors put back in order, padding and all."""
    rows: list[dict[str, Tensor]] = [
        {**one.inputs, "labels": one.labels} if one.labels is not None else one.inputs for one in shards
    ]
    length = sum(row["input_ids"].shape[1] for row in rows)
    order = torch.cat([positions(length, ring, r, layout, ulysses=ulysses) for r in range(ring * ulysses)])
    names = [name for name in rows[0] if name != "documents"]
    return {name: torch.cat([row[name] for row in rows], dim=1)[:, order.argsort()] for name in names}


MESHES = st.sampled_from(
    [
        (1, 1, "contiguous"),
        (2, 1, "zigzag"),
        (3, 1, "contiguous"),
        (1, 4, "contiguous"),
        (2, 2, "zigzag"),
    ]
)


@given(mesh=MESHES, seq=st.integers(1, 40), rows=st.integers(1, 3), packed=st.booleans())
def test_all_shards_together_are_the_batch(
    mesh: tuple[int, int, str], seq: int, rows: int, packed: bool
) -> None:
    ids = torch.randint(1, 99, (rows, seq), generator=torch.Generator().manual_seed(seq))
    batch = {"input_ids": ids, "labels": ids.clone()}
    want = torch.arange(seq).expand(rows, seq)
    if packed:
        want = torch.cat((torch.arange(seq // 2), torch.arange(seq - seq // 2))).expand(rows, seq)
        batch["position_ids"] = want
    shards = _shards(batch, *mesh)
    whole = _whole(shards, *mesh)
    assert torch.equal(whole["input_ids"][:, :seq], ids)
    assert torch.equal(whole["position_ids"][:, :seq], want)
    assert torch.equal(whole["labels"][:, : seq - 1], ids[:, 1:])
    assert bool((whole["labels"][:, seq - 1 :] == IGNORED).all())
    assert len({one.inputs["input_ids"].shape for one in shards}) == 1
    assert all(one.seq == seq for one in shards)
    assert ("documents" in shards[0].inputs) == (packed and seq > 1)


def test_label_at_the_border_is_the_next_shards_first_token() -> None:
    """HF docs, ALST: shifting after sharding loses it."""
    ids = torch.arange(1, 9)[None]
    first, second = _shards({"input_ids": ids, "labels": ids}, 2, 1, "contiguous")
    assert first.labels is not None
    assert second.labels is not None
    assert first.labels.tolist() == [[2, 3, 4, 5]]
    assert second.labels.tolist() == [[6, 7, 8, IGNORED]]


def test_an_odd_packed_length_drops_no_token() -> None:
    """TransformerEngine 1930: packed length 7 on two ranks."""
    ids, bounds = torch.arange(1, 8)[None], torch.tensor([0, 3, 7])
    shards = _shards({"input_ids": ids, "cu_seqlens": bounds}, 2, 1, "contiguous")
    assert torch.cat([one.inputs["input_ids"] for one in shards], 1).tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert shards[0].inputs["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1, -1]]


def test_documents_are_those_of_the_whole_sequence_on_every_rank() -> None:
    """prime-rl 2392: boundaries taken from a later rank's own position ids are wrong."""
    ids = torch.arange(8)[None]
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    by_positions = _shards({"input_ids": ids, "position_ids": restarting}, 2, 1, "zigzag")
    by_bounds = _shards({"input_ids": ids, "cu_seqlens": torch.tensor([0, 3, 8])}, 2, 1, "zigzag")
    for one, other in zip(by_positions, by_bounds, strict=True):
        assert one.inputs["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
        assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)


@pytest.mark.parametrize(
    ("mask", "labels", "documents"),
    [
        ([1, 1, 1, 1], [2, 3, 4, IGNORED], None),
        ([1, 1, 0, 0], [2, IGNORED, IGNORED, IGNORED], None),
        ([0, 1, 1, 1], [IGNORED, 3, 4, IGNORED], [-1, 0, 0, 0]),
        ([1, 0, 1, 1], [IGNORED, IGNORED, 4, IGNORED], [0, -1, 0, 0]),
    ],
)
def test_a_padding_mask_is_honoured(mask: list[int], labels: list[int], documents: list[int] | None) -> None:
    ids = torch.arange(1, 5)[None]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([mask])}
    (shard,) = _shards(batch, 1, 1, "contiguous")
    assert shard.labels is not None
    assert shard.labels.tolist() == [labels]
    found = shard.inputs.get("documents")
    assert (None if found is None else found.tolist()) == (None if documents is None else [documents])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"atention_mask": torch.ones(1, 4)}, "nearest is attention_mask"),
        ({"pixel_values": torch.ones(1, 4)}, "does not know pixel_values"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask is \[1, 1, 4, 4\]"),
        ({"position_ids": torch.zeros(3, 1, 4)}, r"position_ids are \[3, 1, 4\]"),
        ({"labels": torch.ones(1, 3)}, r"labels are \[1, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "from 0 to S = 4"),
        ({"cu_seqlens": torch.tensor([0, 4]), "position_ids": torch.arange(4)[None]}, "not both"),
        ({"input_ids": torch.ones(4)}, r"input_ids \[B, S\]"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, Unsupported), match=words):
        _shards({"input_ids": torch.arange(4)[None], **more}, 2, 1, "contiguous")
