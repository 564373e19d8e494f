"""Attention over several ranks against float64 on one; real processes over gloo. Scenarios: peers' bugs, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cp_volta import traffic
from cp_volta.attention import RingAttention, UlyssesAttention, attend
from cp_volta.comm import counting
from cp_volta.group import CpGroup, init_cp_group
from cp_volta.heads import Heads
from cp_volta.layout import block, divisor, positions, score_area
from tc_volta.errors import Unsupported
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Mode(NamedTuple):
    cp: int
    ulysses: int
    layout: str

    def group(self) -> CpGroup:
        return init_cp_group(self.cp, ulysses=self.ulysses, layout=self.layout)


RINGS = [Mode(p, 1, layout) for p in (2, 3, 4) for layout in ("contiguous", "zigzag")]
ULYSSES = [Mode(p, p, "contiguous") for p in (2, 3, 4)]
HYBRIDS = [Mode(4, 2, "zigzag"), Mode(4, 2, "contiguous")]
MODES = RINGS + ULYSSES + HYBRIDS


def _tensors(heads: int, kv: int, seq: int, dim: int, dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, h, seq, dim, dtype=torch.float64, generator=generator).to(dtype)
        for h in (heads, kv, kv, heads)
    ]


def _reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor | None) -> list[Tensor]:
    """out, dq, dk, dv in float64; seen [B or 1, 1, S, S]."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def _causal(seq: int) -> Tensor:
    return torch.ones(seq, seq, dtype=torch.bool).tril()[None, None]


def _errors(got: list[Tensor], want: list[Tensor], at: Tensor) -> list[float]:
    return [
        ((g.double() - w[:, :, at]).abs().max() / w.abs().max()).item()
        for g, w in zip(got, want, strict=True)
    ]


def _run(
    mode: Mode, tensors: list[Tensor], seen: Tensor | None, call: Callable[..., Tensor], **how: Any
) -> tuple[list[float], int, int]:
    """Errors of out, dq, dk, dv on this rank, and the bytes it sent forward and backward."""
    cp = mode.group()
    at = cp.positions(tensors[0].shape[2])
    *inputs, dout = (x[:, :, at].clone() for x in tensors)
    for x in inputs:
        x.requires_grad_()
    with counting() as forward:
        out = call(*inputs, cp, **how)
    with counting() as backward:
        out.backward(dout)
    got = [out.detach(), *(x.grad for x in inputs)]
    assert all(x.dtype == tensors[0].dtype for x in got)
    return _errors(got, _reference(*tensors, seen), at), forward.bytes_sent, backward.bytes_sent


def _parity(rank: int, mode: Mode, shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool) -> Any:
    tensors = _tensors(*shape, dtype)
    return _run(mode, tensors, _causal(shape[2]) if causal else None, attend, causal=causal)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_out_and_gradients_are_those_of_one_device(mode: Mode, dtype: torch.dtype) -> None:
    """diffusers #14265, TE #1557, ring-flash-attention #42: each of out, dq, dk, dv, in each dtype."""
    for errors, *_ in run_ranks(_parity, mode.cp, mode, (12, 12, 288, 64), dtype, True):
        assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("mode", [Mode(2, 1, "zigzag"), Mode(2, 2, "contiguous")], ids=str)
def test_at_the_reference_shape(mode: Mode) -> None:
    for errors, *_ in run_ranks(_parity, mode.cp, mode, (12, 12, 2304, 64), torch.float32, True):
        assert max(errors) <= 2e-6, errors


@pytest.mark.parametrize("heads", [(12, 2), (14, 2), (16, 8), (7, 1)], ids=str)
@pytest.mark.parametrize("mode", [*ULYSSES, Mode(4, 1, "zigzag"), Mode(4, 2, "zigzag")], ids=str)
def test_any_head_counts_and_bytes_by_the_formula(mode: Mode, heads: tuple[int, int]) -> None:
    """verl #850, LlamaFactory #10794: fewer key/value heads than ranks; torchtitan #1283: they travel compact."""
    seq, dim = 96, 16
    found = run_ranks(_parity, mode.cp, mode, (*heads, seq, dim), torch.float32, True)
    for rank, (errors, forward, backward) in enumerate(found):
        assert max(errors) <= 2e-6, errors
        want = _formula(mode, heads, seq, dim, rank)
        assert (forward, backward) == (want.forward, want.backward)


def _formula(mode: Mode, counts: tuple[int, int], seq: int, dim: int, rank: int) -> traffic.Traffic:
    return traffic.attention(
        batch=1,
        seq=seq,
        dim=dim,
        itemsize=4,
        query=counts[0],
        kv=counts[1],
        ring_ranks=mode.cp // mode.ulysses,
        ulysses_ranks=mode.ulysses,
        rank=rank,
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_heads_send_what_the_paper_says(ranks: int) -> None:
    """e B s D (2H + 2G')(P-1)/P of DeepSpeed-Ulysses; 8-to-2 heads on 4 and 8 ranks replicate."""
    batch, shard, dim, query, kv = 2, 64, 128, 8, 2
    got = traffic.ulysses(
        batch=batch, shard=shard, dim=dim, itemsize=2, heads=Heads(query, kv, ranks), rank=ranks - 1
    )
    want = 2 * batch * shard * dim * (2 * query + 2 * max(kv, ranks)) * (ranks - 1) // ranks
    assert got == traffic.Traffic(forward=want, backward=want)


@pytest.mark.parametrize(
    "mode", [Mode(2, 1, "zigzag"), Mode(2, 1, "contiguous"), Mode(2, 2, "contiguous")], ids=str
)
def test_without_causality_too(mode: Mode) -> None:
    """pytorch #141429: load balance and is_causal=False."""
    for errors, *_ in run_ranks(_parity, 2, mode, (4, 2, 64, 16), torch.float32, False):
        assert max(errors) <= 2e-6, errors


def _documents() -> Tensor:
    """Two sequences of 64, packed differently: no border falls on a shard's."""
    lengths = ([7, 20, 5, 32], [50, 14])
    return torch.stack(
        [torch.cat([torch.full((n,), i) for i, n in enumerate(row)]).to(torch.int32) for row in lengths]
    )


def _packed(rank: int, mode: Mode, packed: bool, window: int) -> Any:
    documents = _documents() if packed else None
    seen = _causal(64)
    if packed:
        seen = seen & (documents[:, :, None] == documents[:, None, :])[:, None]
    if window:
        seen = seen & ~torch.ones(64, 64, dtype=torch.bool).tril(-window)
    tensors = _tensors(4, 2, 64, 16, torch.float32, batch=2)
    return _run(mode, tensors, seen, attend, documents=documents, window=window or None)


@pytest.mark.parametrize(
    "mode",
    [Mode(4, 1, "zigzag"), Mode(2, 1, "contiguous"), Mode(2, 2, "contiguous"), Mode(4, 2, "zigzag")],
    ids=str,
)
@pytest.mark.parametrize(("packed", "window"), [(True, 0), (False, 10), (True, 10)])
def test_packed_documents_and_windows_are_honoured(mode: Mode, packed: bool, window: int) -> None:
    """axolotl #3608, AReaL #1442: no leak between documents; prime-rl #2828: a window is not ignored."""
    for errors, *_ in run_ranks(_packed, mode.cp, mode, packed, window):
        assert max(errors) <= 2e-6, errors


def _compiled(rank: int, mode: Mode) -> Any:
    cp = mode.group()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 1.0, k, v, cp) * 1.0

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = _tensors(6, 3, 48, 16, torch.float32)
    return _run(mode, tensors, _causal(48), lambda q, k, v, _: compiled(q, k, v))


@pytest.mark.parametrize(
    "mode", [Mode(2, 1, "zigzag"), Mode(2, 2, "contiguous"), Mode(4, 2, "zigzag")], ids=str
)
def test_one_graph_under_compile(mode: Mode) -> None:
    for errors, forward, backward in run_ranks(_compiled, mode.cp, mode):
        assert max(errors) <= 2e-6, errors
        assert forward
        assert backward


def _recomputed(rank: int, mode: Mode) -> Any:
    def call(*inputs: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)

    return _run(mode, _tensors(4, 2, 48, 16, torch.float32), _causal(48), call)


@pytest.mark.parametrize("mode", [Mode(2, 1, "zigzag"), Mode(2, 2, "contiguous")], ids=str)
def test_checkpoints_give_the_same_gradients_and_send_forward_again(mode: Mode) -> None:
    """torchtitan #1522."""
    for rank, (errors, forward, backward) in enumerate(run_ranks(_recomputed, 2, mode)):
        want = _formula(mode, (4, 2), 48, 16, rank)
        assert max(errors) <= 2e-6, errors
        # Ulysses: recomputation stops early, once what the backward needs is there: the way home is not run again
        home = 4 * 24 * 16 * 2 if mode.ulysses > 1 else 0
        assert (forward, backward) == (want.forward, want.backward + want.forward - home)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_zigzag_balances_and_contiguous_has_its_bound(ranks: int) -> None:
    shard = 512
    for layout, bound in (("zigzag", 1.0), ("contiguous", (2 * ranks - 1) / ranks)):
        areas = [score_area(r, ranks, shard, causal=True, layout=layout) for r in range(ranks)]
        assert sum(areas) == (shard * ranks) * (shard * ranks + 1) // 2
        assert max(areas) * ranks / sum(areas) == pytest.approx(bound, rel=2e-3)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_pair_of_tokens_is_in_exactly_one_block(layout: str) -> None:
    ring, shard = 4, 6
    seen = torch.zeros(ring * shard, ring * shard, dtype=torch.int64)
    for rank in range(ring):
        for source in range(ring):
            part = block(rank, source, shard, causal=True, layout=layout)
            if part is None:
                continue
            mine = positions(ring * shard, ring, rank, layout)[part.queries]
            its = positions(ring * shard, ring, source, layout)[part.keys]
            scores = torch.ones(len(mine), len(its), dtype=torch.int64)
            seen[mine[:, None], its[None]] += scores.tril() if part.causal else scores
    assert torch.equal(seen, torch.ones_like(seen).tril())


def test_a_length_that_does_not_divide_is_refused_with_the_next_that_does() -> None:
    """EasyContext #57, DeepSpeed #7384."""
    with pytest.raises(ValueError, match="32769 tokens .* 4 parts .* pad it to 32772"):
        positions(32769, 2, 0, "zigzag")
    assert divisor(2, 1, "zigzag") == 4


def test_too_few_heads_for_ulysses_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 query heads do not serve 3 ranks"):
        Heads(2, 1, 3)


def _refusals(rank: int) -> list[str]:
    said = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises((ValueError, Unsupported)) as caught:
            call()
        said.append(str(caught.value))

    refused(lambda: init_cp_group(3))
    refused(lambda: init_cp_group(4, ulysses=3))
    refused(lambda: init_cp_group(4, layout="zagzig"))
    cp, deal = init_cp_group(4), init_cp_group(4, ulysses=4)
    refused(lambda: RingAttention(cp, dropout=0.1))
    refused(lambda: UlyssesAttention(cp))
    q = torch.randn(1, 4, 7, 8)
    refused(lambda: attend(q, q, q, cp))
    refused(lambda: attend(q[:, :2], q[:, :2], q[:, :2], deal))
    refused(lambda: attend(q, q, q, deal, documents=torch.zeros(1, 7, dtype=torch.int32)))
    refused(lambda: attend(q, q, q, deal, causal=False, window=3))
    out = RingAttention(cp)(*(x.detach() for x in (q[:, :, :6],) * 3))  # nothing hangs after all that
    return [*said, str(tuple(out.shape))]


def test_each_wrong_call_has_one_message_and_hangs_no_rank() -> None:
    said = run_ranks(_refusals, 4)
    assert said[0] == said[1] == said[2] == said[3]
    for message, words in zip(
        said[0],
        (
            "4 ranks does not divide into groups of cp_size 3",
            "cp_size 4 does not divide into Ulysses groups of 3",
            "zagzig",
            "dropout is 0.1",
            "ring of 4",
            "multiple of 2",
            "2 query heads do not serve 4 ranks",
            "documents is [B, S] = [1, 28]",
            "window is 3, causal False",
            "(1, 4, 6, 8)",
        ),
        strict=True,
    ):
        assert words in message
