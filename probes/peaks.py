"""Peak arithmetic of known cards, dense, as their maker states it. Unknown is None, never a guess.

Falling back to another card's figure gave others a utilisation of 563 % (AMD-AGI/Primus PR#772).
"""

from __future__ import annotations

from typing import NamedTuple


class _Card(NamedTuple):
    words: str  # consecutive words of the name that CUDA reports; the first card that fits is taken
    fp16: float  # TFLOP/s on tensor cores with float32 accumulation, which is what training does
    bf16: float | None
    fp32: float  # on the plain cores: TF32 is another arithmetic
    source: str


_TURING = "Turing architecture white paper, 2018"
_GA102 = "Ampere GA102 architecture white paper v2, 2021"
_ADA = "Ada architecture white paper v2, 2023"
# GeForce cards accumulate in float32 at half the float16 rate that is advertised; that half is the peak here.
_CARDS = (
    _Card("V100 SXM2", 125.0, None, 15.7, "V100 data sheet, 2020"),
    _Card("V100 SXM3", 130.0, None, 16.35, "DGX-2H data sheet, 2019"),
    _Card("V100 PCIE", 112.0, None, 14.0, "V100 data sheet, 2020"),
    _Card("V100S PCIE", 130.0, None, 16.4, "V100 data sheet, 2020"),
    _Card("TITAN V", 110.0, None, 13.8, "TITAN V announcement, 2017"),
    _Card("T4", 65.0, None, 8.1, "T4 data sheet, 2019"),
    _Card("RTX 2080 Ti", 53.8, None, 13.4, _TURING),
    _Card("TITAN RTX", 130.5, None, 16.3, _TURING),
    _Card("RTX 8000", 130.5, None, 16.3, _TURING),
    _Card("A100", 312.0, 312.0, 19.5, "A100 data sheet, 2021"),
    _Card("A800", 312.0, 312.0, 19.5, "A800 data sheet, 2022"),
    _Card("A30", 165.0, 165.0, 10.3, "A30 data sheet, 2021"),
    _Card("A40", 149.7, 149.7, 37.4, "A40 data sheet, 2021"),
    _Card("A10G", 70.0, 70.0, 35.0, "A10G data sheet, 2021"),
    _Card("A10", 125.0, 125.0, 31.2, "A10 data sheet, 2021"),
    _Card("RTX A6000", 154.8, 154.8, 38.7, _GA102),
    _Card("RTX 3090 Ti", 80.0, 80.0, 40.0, _GA102),
    _Card("RTX 3090", 71.2, 71.2, 35.6, _GA102),
    _Card("RTX 3080 Ti", 68.2, 68.2, 34.1, _GA102),
    _Card("L40S", 362.0, 362.0, 91.6, "L40S data sheet, 2023"),
    _Card("L40", 181.0, 181.0, 90.5, "L40 data sheet, 2022"),
    _Card("L4", 121.0, 121.0, 30.3, "L4 data sheet, 2023"),
    _Card("RTX 4090", 165.2, 165.2, 82.6, _ADA),
    _Card("RTX 4080", 97.5, 97.5, 48.7, _ADA),
    _Card("H100 PCIe", 756.0, 756.0, 51.0, "H100 data sheet, 2023"),
    _Card("H100 NVL", 835.0, 835.0, 60.0, "H100 NVL data sheet, 2024"),
    _Card("H100 80GB HBM3", 989.0, 989.0, 67.0, "H100 data sheet, 2023"),
    _Card("H200 NVL", 835.0, 835.0, 60.0, "H200 data sheet, 2024"),
    _Card("H200", 989.0, 989.0, 67.0, "H200 data sheet, 2024"),
)

_VARIANTS = {"TI", "SUPER", "LAPTOP", "MOBILE", "MAX"}  # words that make another card of the same number


def peak_flops_per_s(name: str, dtype: str) -> tuple[float | None, str]:
    """(operations per second, where it comes from), or (None, why not).

    name: as torch.cuda.get_device_name; dtype: fp32, fp16 or bf16, the autocast dtype where there is one.
    """
    card = next((card for card in _CARDS if _fits(card.words, name)), None)
    if card is None:
        return None, f"no peak is known for {name!r}"
    if "MIG" in _words(name):
        return None, f"{name!r} is a slice of a card: the card's peak is not its own"
    rate = {"fp16": card.fp16, "bf16": card.bf16, "fp32": card.fp32}[dtype]
    if rate is None:
        return None, f"{card.words} has no {dtype} arithmetic of its own"
    return rate * 1e12, f"NVIDIA {card.source}: {card.words}, dense {dtype}"


def _fits(words: str, name: str) -> bool:
    """Whole words in order: "A10" is neither "A100" nor "A10G", and "RTX 4080" is not "RTX 4080 SUPER"."""
    found, wanted = _words(name), _words(words)
    if any(word in _VARIANTS and word not in wanted for word in found):
        return False
    return any(found[at : at + len(wanted)] == wanted for at in range(len(found)))


def _words(name: str) -> list[str]:
    return name.replace("-", " ").upper().split()
