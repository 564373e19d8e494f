"""Which attention kernel accepts which call, is it the one that really ran, and are output and gradients right?

Declared here without torch. One cell asks one kernel, in one dtype and with one mask, for the product of the shapes
below; each shape is run forward and backward under the profiler, and held to float64. Axes:

through     torch: F.scaled_dot_product_attention, a named kernel by torch.nn.attention.sdpa_kernel.
            tc_volta: its op, a named kernel by that op's own argument
kernel      auto: what a plain call picks. math, efficient, flash, cudnn, and (tc_volta alone) xformers: this or none
dtype       of queries, keys, values and the output's gradient
mask        none. causal: the call's own flag. padding: bool [B, 1, 1, T], keys after a sequence's end are hidden.
            additive: [1, H, S, T] in dtype, a bias per head, later keys -inf. blind: bool [B, 1, S, T], causal and
            padded at the left, so that the first queries see no key: their output and gradients are zero
heads       query heads
kv_heads    key/value heads, several apart by spaces: "4 2 1"; fewer than heads is grouped queries (GQA)
head_dims   several apart by spaces, as are
seqs        queries, and as many keys
batch       sequences

    ok            every shape was accepted by the kernel that was asked for, and is right
    caveat        as ok, but some shapes were refused; or a plain call fell to math, with all scores in memory
    mismatch      output or a gradient is beyond its bar, another kernel ran, or backward fails where forward did not
    nonfinite     NaN or infinity where the reference has none
    unsupported   (a status) every shape was refused; the row has the reason

An error is max|difference| / max|reference| per tensor (for dq and dk, the larger of the two terms whose difference
they are). Its bar is BARS, eight units of roundoff in half precision: probabilities and their gradients are rounded
before they are multiplied, and grouped heads are added up in dtype. In float32 it is 160: a score of D products is
rounded D times, and its error is its probability's relative error. Honest on a CPU (math and flash, all masks, up to
300 tokens, four seeds): at most 0.28 of the bar in float32, 0.47 in float16, 0.57 in bfloat16.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, NamedTuple

import msgspec

from harness.cells import Axes, Device, Measure, Probe

BARS = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Shape(NamedTuple):
    """One call's sizes; as many keys as queries."""

    kv_heads: int
    head_dim: int
    seq: int


class SdpaAxes(Axes, frozen=True, kw_only=True):
    """One kernel, dtype and mask, and the shapes it is asked for; see the module."""

    through: Literal["torch", "tc_volta"] = "torch"
    kernel: Literal["auto", "math", "efficient", "xformers", "flash", "cudnn"] = "auto"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    mask: Literal["none", "causal", "padding", "additive", "blind"] = "causal"
    heads: Positive = 4
    kv_heads: int | str = "4 2 1"
    head_dims: int | str = "16 64 80"
    seqs: int | str = "2 33 128"
    batch: Positive = 2

    def __post_init__(self) -> None:
        for kv_heads, _, seq in self.shapes():
            if self.heads % kv_heads:
                raise ValueError(f"{self.heads} query heads are no multiple of {kv_heads} key/value heads")
            if self.mask in ("padding", "blind") and seq < 2:
                raise ValueError(f"mask {self.mask!r} hides some keys and not others: seqs are 2 or more")

    def shapes(self) -> list[Shape]:
        """The product of key/value heads, head dims and lengths. Raises ValueError for what is no list of sizes."""
        lists = [_sizes(name, str(getattr(self, name))) for name in ("kv_heads", "head_dims", "seqs")]
        return [Shape(*sizes) for sizes in itertools.product(*lists)]


def _sizes(name: str, text: str) -> list[int]:
    words = text.split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{name} is {text!r}; it takes sizes of 1 or more, apart by spaces: '4 2 1'")
    return [int(word) for word in words]


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason. What a kernel refuses is no skip: it is asked."""
    assert isinstance(axes, SdpaAxes)
    if axes.through == "torch" and axes.kernel == "xformers":
        return "torch has no kernel of that name: xformers is reached through tc_volta"
    return ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, SdpaAxes)
    rate = 2e9 if device == "cpu" else 1e12  # of float64, written out
    work = sum(axes.batch * axes.heads * seq**2 * dim * 20 for _, dim, seq in axes.shapes())
    return (0.5 if device == "cpu" else 5.0) + work / rate


PROBE = Probe(
    name="sdpa-backends",
    question="Which attention kernel accepts which call, really ran, and gives right output and gradients?",
    axes=SdpaAxes,
    work="probes.sdpa_backends.work:run",
    timed=False,
    preload=("torch", "torch.profiler", "probes.sdpa_backends.work"),
    ignores=("warmup_steps", "steps", "check", "cache"),
    sources=("probes.sdpa_backends", "probes.train_step", "probes.models", "tc_volta"),
    skip=skip,
    estimate_s=_estimate_s,
)
