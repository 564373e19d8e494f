"""Which attention kernel really ran: one step under the profiler, names read, the request ignored."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.rows import AttentionReport

# What a kernel's name on the GPU gives away. The CUTLASS kernel is torch's own and xformers' alike.
_CUDA = {
    "cutlass": ("fmha_cutlassF", "fmha_cutlassB"),
    "flash": ("flash_fwd", "flash_bwd"),
    "cudnn": ("sdpa_sm", "cudnn_generated_fort_native_sdpa", "fort_native_sdpa", "cudnn::fusion::sdpa"),
}
# And an operator's name, on any device.
_OPERATORS = {
    "flash": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_flash_attention_forward"),
    "efficient": ("aten::_efficient_attention_forward",),
    "xformers": ("xformers::", "xformers_flash::"),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward"),
    "math": ("aten::_scaled_dot_product_attention_math", "tc_volta::flash_attn"),
}
_SOFTMAX = ("aten::_softmax", "aten::logsumexp")


def observe(asked: str, step: Callable[[], Any], device: str) -> AttentionReport:
    """Run one step and report the kernel that ran in it.

    asked: the attention axis. eager and sdpa leave the choice open, so whatever ran honours them.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    names = collections.Counter(event.name for event in seen.events())
    return classify(asked, names, device, "xformers.ops" in sys.modules)


def classify(
    asked: str, names: collections.Counter[str], device: str, xformers_loaded: bool
) -> AttentionReport:
    """The report on a profile's names. Pure, so that profiles of other GPUs can be tested."""
    evidence: collections.Counter[str] = collections.Counter()
    ran = "unknown"
    for family, marks in _CUDA.items() if device == "cuda" else ():
        found = {n: c for n, c in names.items() if any(mark in n for mark in marks)}
        if found:
            evidence.update(found)
            ran = _cutlass(asked, names, xformers_loaded) if family == "cutlass" else family
    if ran == "unknown":
        ran = _from_operators(names, evidence)
    honoured = asked in ("eager", "sdpa") or ran == asked
    return AttentionReport(
        asked=asked,
        ran=ran,
        honoured=honoured,
        evidence={name[:120]: count for name, count in evidence.most_common(8)},
        source="profiler: CUDA kernels" if device == "cuda" and ran != "math" else "profiler: operators",
    )


def _cutlass(asked: str, names: collections.Counter[str], xformers_loaded: bool) -> str:
    """One kernel, two front ends. xformers calls aten's operator below torch's scaled_dot_product one."""
    through_sdpa = any("_scaled_dot_product_efficient_attention" in name for name in names)
    return "xformers" if xformers_loaded and not through_sdpa else "efficient"


def _from_operators(names: collections.Counter[str], evidence: collections.Counter[str]) -> str:
    for family, marks in _OPERATORS.items():
        found = {n: c for n, c in names.items() if n.startswith(marks)}
        if found:
            evidence.update(found)
            return family
    softmax = {n: c for n, c in names.items() if n in _SOFTMAX}
    evidence.update(softmax)
    return "math" if softmax else "unknown"
