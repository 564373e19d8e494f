"""tc_volta::flash_attn inside a compiled graph: no break, the same numbers, under autocast and checkpointing too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tc_volta
from tc_volta.kernels import KERNELS
from tc_volta.record import Saved

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(seq: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, seq, heads, 64, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
    ]


def with_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def attention(kernel: str = "auto", **how: object) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tc_volta.flash_attn(q * 2, k, v + 1, kernel=kernel, **how).transpose(1, 2).flatten(2) * 0.5  # type: ignore[arg-type, union-attr]

    return function


MASK = torch.ones(33, 33, dtype=torch.bool).tril(3)


@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
@pytest.mark.parametrize(
    "how", [{"causal": True}, {"causal": True, "window": 7}, {"attn_mask": MASK}], ids=str
)
def test_one_graph_with_the_same_outputs_and_gradients(kernel: str, how: dict[str, object]) -> None:
    function = attention(kernel, **how)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, qkv()), with_gradients(function, qkv()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_inductor_gives_the_same(dtype: torch.dtype) -> None:
    function = attention(causal=True)
    compiled = torch.compile(function, fullgraph=True)
    got, want = with_gradients(compiled, qkv(dtype=dtype)), with_gradients(function, qkv(dtype=dtype))
    for g, w in zip(got, want, strict=True):
        assert (g.float() - w.float()).norm() < (1e-6 if dtype == torch.float32 else 2e-3) * w.float().norm()


def test_inductor_takes_a_single_token() -> None:
    function = attention(causal=True)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(*qkv(1)), function(*qkv(1)))


def test_one_graph_serves_every_length_when_dynamic() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    function = attention(causal=True)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for seq in (33, 40, 57):
        torch.testing.assert_close(with_gradients(compiled, qkv(seq)), with_gradients(function, qkv(seq)))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_or_inside_the_compiled_function(dtype: torch.dtype) -> None:
    function = attention(causal=True)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return function(q, k, v.to(dtype)).float()

    want = with_gradients(inside, qkv())
    torch.testing.assert_close(
        with_gradients(torch.compile(inside, fullgraph=True, backend="aot_eager"), qkv()), want
    )
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype):
        got = compiled(*qkv())
        assert torch.equal(got, function(*qkv()))
    assert got.dtype == dtype
    assert compiled(*qkv()).dtype == torch.float32  # the graph is guarded on autocast


def test_a_checkpointed_call_is_one_graph() -> None:
    function = attention(causal=True)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(function, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]

    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, qkv()), with_gradients(function, qkv()))


def test_what_cannot_be_served_raises_from_inside_a_graph_too() -> None:
    for how, message in (({"kernel": "efficient"}, "cannot serve"), ({"kernel": "fast"}, "unknown kernel")):
        with pytest.raises(ValueError, match=message):
            torch.compile(attention(**how), fullgraph=True, backend="aot_eager")(*qkv())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "masked"),
    [("efficient", False), ("efficient", True), ("cudnn", False), ("cudnn", True), ("flash", False)],
)
def test_this_torch_has_the_ops_that_the_cuda_kernels_call(name: str, masked: bool) -> None:
    """Shapes alone, on meta tensors: the arguments fit this version's schemas, and lse comes back [B, H, S]."""
    q, k, v, dout = (torch.empty(2, 4, 33, 64, dtype=torch.float16, device="meta") for _ in range(4))
    bias = torch.empty(2, 1, 33, 33, dtype=torch.float16, device="meta") if masked else None
    record = KERNELS[name]
    out, lse = record.forward(q, k, v, bias, not masked, 0, 0.125)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    saved = Saved(q=q, k=k, v=v, out=out, lse=lse, bias=bias, causal=not masked, window=0, scale=0.125)
    assert [x.shape for x in record.backward(dout, saved)] == [q.shape] * 3
