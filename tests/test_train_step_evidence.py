"""The kernel that ran is read from a profile's names; names below were recorded on an H200 and on a CPU."""

from __future__ import annotations

import pytest

from probes.train_step.evidence import classify

CUTLASS = "fmha_cutlassF_f16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>)"
CUTLASS_V100 = (
    "fmha_cutlassF_f16_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>)"
)
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::half_t>>"
SPLIT = "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false>>"
CUDNN = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
)
SDPA_OP = "aten::_scaled_dot_product_efficient_attention"
BELOW = "aten::_efficient_attention_forward"


@pytest.mark.parametrize(
    ("asked", "names", "xformers", "ran"),
    [
        ("efficient", {CUTLASS: 56, SDPA_OP: 56, BELOW: 56}, False, "efficient"),
        ("efficient", {CUTLASS_V100: 56, SDPA_OP: 56, BELOW: 56}, True, "efficient"),
        ("xformers", {CUTLASS: 56, BELOW: 56, "tc_volta::flash_attn": 28}, True, "xformers"),
        ("flash", {FLASH: 56, "aten::_flash_attention_forward": 28}, False, "flash"),
        ("flash", {SPLIT: 28}, False, "flash"),
        ("cudnn", {CUDNN: 56}, False, "cudnn"),
        ("math", {"aten::bmm": 168, "aten::logsumexp": 28, "tc_volta::flash_attn": 28}, False, "math"),
        ("eager", {"aten::bmm": 168, "aten::_softmax": 28}, False, "math"),
        ("sdpa", {CUDNN: 56}, False, "cudnn"),
    ],
)
def test_kernels_of_a_gpu_are_told_apart(asked: str, names: dict[str, int], xformers: bool, ran: str) -> None:
    found = classify(asked, names, "cuda", xformers)
    assert (found.ran, found.honoured) == (ran, True)
    assert found.evidence


@pytest.mark.parametrize(
    ("asked", "names", "ran"),
    [
        ("flash", {"aten::bmm": 168, "aten::_softmax": 28}, "math"),
        ("efficient", {FLASH: 28}, "flash"),
        ("xformers", {CUTLASS: 56, SDPA_OP: 56}, "efficient"),
        ("eager", {FLASH: 28}, "flash"),
        ("flash", {"aten::mm": 400}, "unknown"),
        ("sdpa", {"aten::mm": 400}, "unknown"),
    ],
)
def test_another_kernel_than_the_one_asked_for_is_not_honoured(
    asked: str, names: dict[str, int], ran: str
) -> None:
    found = classify(asked, names, "cuda", xformers_loaded=True)
    assert (found.ran, found.honoured) == (ran, False)


def test_two_kernels_in_one_step_are_both_named() -> None:
    """A backward, or some layers, that went another way than the forward."""
    found = classify("flash", {FLASH: 28, CUTLASS: 28, SDPA_OP: 28}, "cuda", xformers_loaded=False)
    assert found.ran == "efficient, flash"
    assert not found.honoured


def test_how_xformers_was_told_from_its_twin_is_said() -> None:
    assert "xformers is loaded" in classify("xformers", {CUTLASS: 2}, "cuda", xformers_loaded=True).source
    assert (
        "torch's own operator"
        in classify("efficient", {CUTLASS: 2, SDPA_OP: 2}, "cuda", xformers_loaded=True).source
    )


def test_a_gpu_kernel_of_unknown_name_is_still_known_by_its_operator() -> None:
    found = classify("flash", {"flash3_fprop_v2": 28, "aten::_flash_attention_forward": 28}, "cuda", False)
    assert (found.ran, found.source) == ("flash", "profiler: operators")


def test_a_softmax_of_the_loss_alone_is_no_attention() -> None:
    assert classify("math", {"aten::_log_softmax": 1, "aten::mm": 9}, "cpu", False).ran == "unknown"


def test_compiled_attention_without_a_softmax_by_name_is_known_by_its_products() -> None:
    assert classify("eager", {"aten::bmm": 12}, "cpu", False).ran == "math"
