"""What moves between ranks: the way back from a group's name, a ring that turns, exchanges of uneven parts, counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_volta.comm import Tally, all_to_all, counting, group_of, rotate
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def _group_of_a_name(rank: int) -> tuple[bool, bool]:
    half = dist.new_group([0, 1])
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(RuntimeError, match="no such group"):
        group_of("no such group")
    return group_of(half.group_name) is half, group_of(world.group_name) is world


def test_a_groups_name_leads_back_to_it() -> None:
    """The one private function that comm.py rests on."""
    assert run_ranks(_group_of_a_name, 2) == [(True, True)] * 2


def _turn(rank: int, hops: int) -> tuple[list[float], Tally]:
    x = torch.full((3, 2), float(rank))
    seen = []
    with counting() as ledger:
        for _ in range(hops):
            x = rotate(x, dist.group.WORLD).wait()
            seen.append(float(x[0, 0]))
    return seen, ledger.tallies["rotate"]


def test_after_as_many_hops_as_ranks_everything_is_home() -> None:
    """nccl #783, pytorch #174288: lone sends hang; here each hop is one batch of send and receive, and many in a row end."""
    ranks, hops = 3, 60
    for rank, (seen, tally) in enumerate(run_ranks(_turn, ranks, hops)):
        assert seen == [float((rank - hop) % ranks) for hop in range(1, hops + 1)]
        assert (tally.calls, tally.bytes_sent) == (hops, hops * 3 * 2 * 4)
        assert tally.seconds > 0


def _uneven(rank: int) -> Any:
    give = [1, 2, 3]  # to each rank
    take = [rank + 1] * 3
    x = (100.0 * rank + torch.arange(6.0)).unsqueeze(1).requires_grad_()
    with counting() as outer:
        with counting() as inner:
            got = all_to_all(x, give, take, dist.group.WORLD)
        (got * torch.arange(1.0, len(got) + 1).unsqueeze(1)).sum().backward()
    assert x.grad is not None
    return got.detach().flatten(), x.grad.flatten(), inner.bytes_sent, outer.bytes_sent


def test_uneven_parts_arrive_in_the_order_of_ranks_and_gradients_go_the_same_way_back() -> None:
    found = run_ranks(_uneven, 3)
    starts = [0, 1, 3]
    for rank, (got, grad, forward, both) in enumerate(found):
        rows = [100 * p + starts[rank] + i for p in range(3) for i in range(rank + 1)]
        assert got.tolist() == rows
        # row i of what rank p received from us was weighted by its place there
        assert grad.tolist() == [rank * (p + 1) + i + 1 for p in range(3) for i in range(p + 1)]
        assert forward == 4 * (6 - (rank + 1))
        assert both == forward + 4 * 2 * (rank + 1)


def test_nothing_is_counted_outside_a_block() -> None:
    with counting() as ledger:
        pass
    assert run_ranks(_turn, 2, 1)
    assert ledger.tallies == {}
