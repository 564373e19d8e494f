"""A card's peak is its maker's figure for that very card, or unknown with the reason."""

from __future__ import annotations

import pytest

from probes.peaks import peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-PCIE-32GB", "fp32", 14),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("Tesla V100-SXM3-32GB", "fp16", 130),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A10G", "fp16", 70),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 3090", "fp16", 71.2),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp32", 67),
    ],
)
def test_a_known_card_has_its_published_peak(name: str, dtype: str, tflops: float) -> None:
    rate, source = peak_flops_per_s(name, dtype)
    assert rate == pytest.approx(tflops * 1e12)
    assert source


@pytest.mark.parametrize(
    "name",
    [
        "this CPU",
        "NVIDIA H20",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA GeForce RTX 4080 SUPER",
        "AMD Instinct MI300X",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_an_unknown_card_has_no_peak_and_a_reason(name: str) -> None:
    """Primus PR#772: another card's peak made a utilisation of 563 %."""
    rate, why = peak_flops_per_s(name, "fp16")
    assert rate is None
    assert name in why


def test_a_dtype_that_a_card_lacks_has_no_peak() -> None:
    rate, why = peak_flops_per_s("Tesla V100-SXM2-32GB", "bf16")
    assert rate is None
    assert why == "V100 SXM2 has no bf16 arithmetic of its own"
