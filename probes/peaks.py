"""Peak arithmetic of known devices, dense, as their makers state it. Unknown is None, never a guess."""

from __future__ import annotations

# name as CUDA reports it -> {dtype: operations per second}. fp32 without TF32. Longest name first where one
# begins another. Sources: NVIDIA's datasheets of each card; V100: 125 TFLOP/s fp16 tensor (SXM2), 15.7 fp32.
_PEAKS: dict[str, dict[str, float]] = {
    "Tesla V100-SXM2": {"fp16": 125e12, "fp32": 15.7e12},
    "Tesla V100-SXM3": {"fp16": 130e12, "fp32": 16.35e12},
    "Tesla V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    "Tesla V100S-PCIE": {"fp16": 130e12, "fp32": 16.4e12},
    "Tesla T4": {"fp16": 65e12, "fp32": 8.1e12},
    "NVIDIA A100": {"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12},
    "NVIDIA A10G": {"fp16": 70e12, "bf16": 70e12, "fp32": 35e12},
    "NVIDIA A10": {"fp16": 125e12, "bf16": 125e12, "fp32": 31.2e12},
    "NVIDIA L4": {"fp16": 121e12, "bf16": 121e12, "fp32": 30.3e12},
    "NVIDIA L40S": {"fp16": 362e12, "bf16": 362e12, "fp32": 91.6e12},
    "NVIDIA H100 PCIe": {"fp16": 756e12, "bf16": 756e12, "fp32": 51e12},
    "NVIDIA H100 NVL": {"fp16": 835e12, "bf16": 835e12, "fp32": 60e12},
    "NVIDIA H100 80GB HBM3": {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
    "NVIDIA H200 NVL": {"fp16": 835e12, "bf16": 835e12, "fp32": 60e12},
    "NVIDIA H200": {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
}


def peak_flops_per_s(name: str, dtype: str) -> tuple[float | None, str]:
    """(operations per second, where it comes from), or (None, why not).

    name: as torch.cuda.get_device_name; dtype: fp32, fp16 or bf16.
    """
    known = max(
        (n for n in _PEAKS if name == n or name.startswith((f"{n} ", f"{n}-"))), key=len, default=None
    )
    if known is None:
        return None, f"no peak is known for {name!r}"
    if dtype not in _PEAKS[known]:
        return None, f"{known} has no {dtype} arithmetic of its own"
    return _PEAKS[known][dtype], f"datasheet of {known}, dense {dtype}"
