"""Which environment variables reach a cell, and when they are read.

Behaviour flags of the caller do not leak into a measurement unless the suite names them. Device selection
and system variables pass through; those that change a figure are recorded in the row.
"""

from __future__ import annotations

from collections.abc import Mapping

# Behaviour flags: removed unless the suite's `env` names them.
SCRUBBED = (
    "TORCH_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCHELASTIC_",
    "AOT_",
    "TRITON_",
    "PYTORCH_",
    "CUBLAS_",
    "XFORMERS_",
    "TRANSFORMERS_",
)
# Passed through, and written into run.json because they change what is measured.
RECORDED = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "CC",
    "CXX",
)
# Read when they are used, not when torch is imported: these may be set in a fork of a server that has
# imported torch already. Everything else a suite names gets a server of its own. tests/test_isolation.py
# checks them against the installed torch.
LATE_READ = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_OVERRIDE_ARCH",
        "CUDA_VISIBLE_DEVICES",
        "TMPDIR",
    }
)
# Lets torch ask NVML instead of CUDA whether a device exists, so that a preloaded server stays clean of
# CUDA. No cell or default run reaches for a model hub.
_ALWAYS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KINETO_LOG_LEVEL": "99",  # the profiler otherwise writes two lines into every cell's log
}


def server_env(caller: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server: the caller's without behaviour flags, plus the suite's early-read ones."""
    kept = {name: value for name, value in caller.items() if not name.startswith(SCRUBBED)}
    return {**kept, **_ALWAYS, **early(named)}


def early(named: Mapping[str, str]) -> dict[str, str]:
    """The part of the suite's variables that is read at import, and so decides which server a cell gets."""
    return {name: value for name, value in named.items() if name not in LATE_READ}


def late(named: Mapping[str, str]) -> dict[str, str]:
    """The part of the suite's variables that each cell sets for itself."""
    return {name: value for name, value in named.items() if name in LATE_READ}


def scrubbed(caller: Mapping[str, str]) -> tuple[str, ...]:
    """Names that the caller had set and that cells do not see, for run.json."""
    return tuple(sorted(name for name in caller if name.startswith(SCRUBBED)))


def recorded(caller: Mapping[str, str]) -> dict[str, str]:
    """The passed-through variables that change what is measured, for run.json."""
    return {name: value for name, value in sorted(caller.items()) if _is_recorded(name)}


def _is_recorded(name: str) -> bool:
    """Entries of RECORDED that end in "_" are prefixes; "CC" is not CCACHE_DIR."""
    return any(name.startswith(entry) if entry.endswith("_") else name == entry for entry in RECORDED)
