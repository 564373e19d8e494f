"""The kernels of cp_volta's tiles as they are launched for Qwen2.5-1.5B: width 1,536, vocabulary 151,936.

    python -m harness.probe triton-lowering --file probes/triton_lowering/cp_volta_kernels.py target=sm_70

Executed by the compiling process alone, in a Python that has torch and Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton  # noqa: F401 - needed by what is imported next; tests/test_layers.py reads it here

from cp_volta import triton_rows

cross_entropy = triton_rows._cross_entropy
rms_norm = triton_rows._rms_norm
rms_norm_backward = triton_rows._rms_norm_backward
swiglu = triton_rows._swiglu
swiglu_backward = triton_rows._swiglu_backward

SIGNATURES = {
    "cross_entropy": "*{dtype}:16, *i64:16, *fp32:16, *fp32:16, i32:16, i32, True, 8192; num_warps=16",
    "rms_norm": "*{dtype}:16, *{dtype}:16, *{dtype}:16, i32:16, fp32, 2048; num_warps=8",
    "rms_norm_backward": "*{dtype}:16, *{dtype}:16, *{dtype}:16, *{dtype}:16, *fp32:16, i32, i32:16, fp32, 8, 2048; num_warps=8",
    "swiglu": "*{dtype}:16, *{dtype}:16, *{dtype}:16, i32:16, 2048",
    "swiglu_backward": "*{dtype}:16, *{dtype}:16, *{dtype}:16, i32:16, 2048",
}
