"""Which attention kernel really ran: one step under the profiler, names read, the request ignored."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.rows import AttentionReport

# What a kernel's name on the GPU gives away. The CUTLASS kernel is torch's own and xformers' alike.
_KERNELS = {
    "cutlass": ("fmha_cutlassF", "fmha_cutlassB"),
    "flash": ("flash_fwd", "flash_bwd"),
    "cudnn": ("sdpa_sm", "fort_native_sdpa", "cudnn::fusion::sdpa"),
}
# And an operator's name, on any device.
_OPERATORS = {
    "flash": ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention"),
    "cutlass": (
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_efficient_attention",
        "xformers::efficient_attention",
    ),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention"),
}
# Attention written out, with none of the above: batched products of queries and keys (a model's own linear layers
# are plain products). Compiled, the softmax between them is part of a kernel without a name that says so.
_PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_attention_math")
_SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data", "aten::logsumexp")
_OPEN_CHOICE = ("sdpa",)  # torch chooses: whatever ran is honoured
Names = Mapping[str, int]


def observe(asked: str, step: Callable[[], Any], device: str) -> AttentionReport:
    """Run one step and report the kernel that ran in it."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    return classify(asked, _names(seen), device, "xformers.ops" in sys.modules)


def _names(seen: profile) -> Names:
    """Name -> calls. `seen.events()` builds a tree of Python objects for 20 times what reading the names costs."""
    raw = getattr(getattr(seen, "profiler", None), "kineto_results", None)
    if raw is not None:
        return collections.Counter(event.name() for event in raw.events())
    return collections.Counter(event.name for event in seen.events())


def classify(asked: str, names: Names, device: str, xformers_loaded: bool) -> AttentionReport:
    """The report on a profile's names. Pure, so that profiles of other GPUs can be tested.

    asked: the attention axis. "eager" is attention written out, so it asks for math.
    """
    found, source = _families(names, _KERNELS if device == "cuda" else {}), "profiler: CUDA kernels"
    if not found:
        found, source = _families(names, _OPERATORS), "profiler: operators"
    if not found:
        found = _written_out(names)
    evidence = {name: count for part in found.values() for name, count in part.items()}
    ran = ", ".join(sorted(found)) or "unknown"
    if "cutlass" in found:
        front, how = _front_end(names, xformers_loaded)
        ran, source = ran.replace("cutlass", front), f"{source}; {front}, not its twin: {how}"
    wanted = "math" if asked == "eager" else asked
    return AttentionReport(
        asked=asked,
        ran=ran,
        honoured=ran == wanted or (asked in _OPEN_CHOICE and ran != "unknown"),
        evidence={name[:120]: count for name, count in collections.Counter(evidence).most_common(8)},
        source=source,
    )


def _families(names: Names, marks: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, int]]:
    """family -> its names. More than one family in one step: part of the model went another way."""
    found = {
        family: {name: count for name, count in names.items() if any(mark in name for mark in words)}
        for family, words in marks.items()
    }
    return {family: part for family, part in found.items() if part}


def _written_out(names: Names) -> dict[str, dict[str, int]]:
    products = {name: count for name, count in names.items() if name in _PRODUCTS}
    softmax = {name: count for name, count in names.items() if name in _SOFTMAX}
    return {"math": products | softmax} if products else {}


def _front_end(names: Names, xformers_loaded: bool) -> tuple[str, str]:
    """("efficient" or "xformers", how it shows): one CUDA kernel, two ways to it.

    torch's way goes through aten::_scaled_dot_product_efficient_attention; xformers calls the operator below it.
    """
    if any("_scaled_dot_product_efficient_attention" in name for name in names):
        return "efficient", "torch's own operator called it"
    if xformers_loaded:
        return "xformers", "no operator of torch's attention called it, and xformers is loaded"
    return "efficient", "xformers is not loaded"
