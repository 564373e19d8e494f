"""The kernels behind tc_volta::flash_attn: one record each, with what it cannot do and why.

A kernel returns (out, lse) and takes them back in its backward, so that partial results over key blocks can be
merged. To add one, write its record in a file of its own and add it to KERNELS.
"""

from __future__ import annotations

from tc_volta.kernel_cudnn import CUDNN
from tc_volta.kernel_cutlass import EFFICIENT, XFORMERS
from tc_volta.kernel_flash import FLASH
from tc_volta.kernel_math import MATH, math_backward
from tc_volta.record import Kernel, Saved

__all__ = ["KERNELS", "Kernel", "Saved", "math_backward"]

# In order of preference for "auto": the fastest first, on the cards that have it.
KERNELS: dict[str, Kernel] = {k.name: k for k in (FLASH, CUDNN, EFFICIENT, XFORMERS, MATH)}
