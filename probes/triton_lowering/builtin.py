"""The built-in kernels: one of each kind that Inductor or an attention makes. An example of a file for `--file`.

SIGNATURES says how each is called, as `triton.tools.compile` has it: one entry per argument, a type (":16" when it
is known to be a multiple of 16) or a constant, then ";" and launch options. "{dtype}" and "{size}" are axes.
Executed by the compiling process alone, with nothing but Triton around it.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

SIGNATURES = {
    "pointwise": "*{dtype}:16, *{dtype}:16, *{dtype}:16, i32, {size}",
    "reduction": "*{dtype}:16, *{dtype}:16, i32, {size}",
    "dot": "*{dtype}:16, *{dtype}:16, *{dtype}:16, 64, 64, {size}",
    "dot_reduce": "*{dtype}:16, *{dtype}:16, *{dtype}:16, 64, 64, {size}",
    "attention": "*{dtype}:16, *{dtype}:16, *{dtype}:16, *{dtype}:16, i32:16, fp32, 64, 64, {size}",
}


@triton.jit
def pointwise(x_ptr, y_ptr, out_ptr, n, SIZE: tl.constexpr):
    BLOCK: tl.constexpr = 16 * SIZE
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.sigmoid(x) * y).to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def reduction(x_ptr, out_ptr, n, SIZE: tl.constexpr):
    BLOCK: tl.constexpr = 16 * SIZE
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit
def dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b).to(out_ptr.dtype.element_ty))


@triton.jit
def dot_reduce(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m, tl.max(tl.dot(a, b), axis=1).to(out_ptr.dtype.element_ty))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, seq, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """One head, not causal: softmax(q k^T) v over blocks of N keys, with the running maximum and sum."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    for start in range(0, seq, N):
        n = start + tl.arange(0, N)
        k = tl.load(k_ptr + n[None, :] * D + d[:, None])
        scores = tl.dot(q, k) * scale
        new = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp(scores - new[:, None])
        shrink = tl.exp(top - new)
        v = tl.load(v_ptr + n[:, None] * D + d[None, :])
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        total = total * shrink + tl.sum(p, axis=1)
        top = new
    tl.store(out_ptr + m[:, None] * D + d[None, :], (out / total[:, None]).to(out_ptr.dtype.element_ty))
