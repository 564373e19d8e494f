"""Who works together: a mesh of dp x ring x ulysses ranks, and this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_volta.layout import check_layout, divisor, positions


@dataclass(frozen=True, kw_only=True)
class CpGroup:
    """One rank's view of its context-parallel group. Build it with `init_cp_group`.

    mesh: dimensions dp, ring, ulysses. dp_cp_mesh: all ranks, flat: what FSDP2's fully_shard takes, so that
    parameters, gradients and optimiser states shard over dp x cp together.
    """

    mesh: DeviceMesh
    dp_cp_mesh: DeviceMesh
    group: dist.ProcessGroup  # the cp ranks, in order
    ring_group: dist.ProcessGroup
    ulysses_group: dist.ProcessGroup
    layout: str

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return self.group.rank()

    @property
    def ring(self) -> int:
        """Ranks of the ring."""
        return self.ring_group.size()

    @property
    def ulysses(self) -> int:
        """Ranks that deal the heads out."""
        return self.ulysses_group.size()

    @property
    def dp_size(self) -> int:
        """How many sequences are worked on at once."""
        return self.mesh.size() // self.size

    @property
    def dp_rank(self) -> int:
        """Which of these sequences this rank works on: what a sampler shards by."""
        return self.mesh.get_local_rank("dp")

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        """All ranks: over these, gradients are summed."""
        return self.dp_cp_mesh.get_group()

    @property
    def divisor(self) -> int:
        """What a sequence's length has to be a multiple of."""
        return divisor(self.ring, self.ulysses, self.layout)

    def positions(self, seq: int, rank: int | None = None) -> Tensor:
        """The global positions of the tokens that a rank (this one) holds of a sequence of `seq`."""
        return positions(
            seq, self.ring, self.rank if rank is None else rank, self.layout, ulysses=self.ulysses
        )


def init_cp_group(
    cp_size: int | None = None,
    *,
    ulysses: int | None = None,
    layout: str = "auto",
    device_type: str | None = None,
) -> CpGroup:
    """Split the world into dp x cp, and cp into ring x ulysses. Every rank of the world calls it alike.

    cp_size: ranks that share a sequence; None for all. ulysses: how many of them deal heads out (fastest, so that
    they are neighbours); 1, the default, is a ring alone, cp_size Ulysses alone.
    layout: "contiguous", "zigzag", or "auto": zigzag where there is a ring.
    Raises ValueError for sizes that do not divide, RuntimeError before init_process_group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "init_cp_group needs torch.distributed: call init_process_group first, or use torchrun"
        )
    world = dist.get_world_size()
    cp_size = world if cp_size is None else cp_size
    ulysses = 1 if ulysses is None else ulysses
    if cp_size < 1 or world % cp_size:
        raise ValueError(f"a world of {world} ranks does not divide into groups of cp_size {cp_size}")
    if ulysses < 1 or cp_size % ulysses:
        raise ValueError(f"cp_size {cp_size} does not divide into Ulysses groups of {ulysses}")
    if layout == "auto":
        layout = "zigzag" if cp_size > ulysses else "contiguous"
    check_layout(layout)
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    shape = (world // cp_size, cp_size // ulysses, ulysses)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ring", "ulysses"))
    return CpGroup(
        mesh=mesh,
        dp_cp_mesh=init_device_mesh(device_type, (world,), mesh_dim_names=("dp_cp",)),
        group=_consecutive(cp_size),
        ring_group=mesh.get_group("ring"),
        ulysses_group=mesh.get_group("ulysses"),
        layout=layout,
    )


def _consecutive(size: int) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks that holds this one; every rank makes all of them, in one order."""
    world, mine = dist.get_world_size(), None
    for start in range(0, world, size):
        ranks = list(range(start, start + size))
        made = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = made
    return cast(dist.ProcessGroup, mine)
