"""What to do and what to leave on a given device: decisions, each with its reason and source.

`policy` is a function of facts alone, so that a V100's decisions can be read, and tested, on any machine.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What decisions depend on. Versions are "2.10.0", "" where a library is absent."""

    kind: str  # "cpu" or "cuda"
    capability: tuple[int, int] = (0, 0)
    name: str = ""
    torch: str = ""
    triton: str = ""
    cudnn: int = 0  # as torch.backends.cudnn.version(): 91002 is 9.10.2
    multiprocessors: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice. `refuses` marks what is not done at all, rather than done another way."""

    name: str
    value: str | bool
    reason: str
    source: str
    refuses: bool = False


def device_facts(device: torch.device | str) -> DeviceFacts:
    """The facts of a device of this machine."""
    device = torch.device(device)
    base = DeviceFacts(kind=device.type, torch=torch.__version__.split("+")[0], triton=_version("triton"))
    if device.type != "cuda":
        return base
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        kind="cuda",
        capability=(properties.major, properties.minor),
        name=properties.name,
        torch=base.torch,
        triton=base.triton,
        cudnn=torch.backends.cudnn.version() or 0,
        multiprocessors=properties.multi_processor_count,
    )


def policy(device: torch.device | str | DeviceFacts) -> tuple[Decision, ...]:
    """The decisions for a device, or for the facts of one that is not here."""
    facts = device if isinstance(device, DeviceFacts) else device_facts(device)
    decisions = [_use_cache()]
    if facts.kind != "cuda":
        return (*decisions, _cpu_cudagraphs())
    decisions += [_cudagraphs(facts), _gemm_autotune(facts), _bf16(facts), _kv_heads(facts)]
    if facts.capability < (7, 5) and facts.cudnn >= 91100:
        decisions.append(_cudnn(facts))
    return tuple(decisions)


def decision(decisions: tuple[Decision, ...], name: str) -> Decision:
    """The one called `name`. Raises KeyError with the names there are."""
    found = {d.name: d for d in decisions}
    if name not in found:
        raise KeyError(f"no decision {name!r}; there are {', '.join(found)}")
    return found[name]


def _use_cache() -> Decision:
    return Decision(
        name="use_cache",
        value=False,
        reason="the key/value cache makes each layer's index a constant of its graph: one graph per layer, then "
        "the recompile limit; training needs no cache",
        source="measured: 12 layers of Qwen2 gave 8 graphs and the limit with it, one graph without",
    )


def _cpu_cudagraphs() -> Decision:
    return Decision(name="cudagraphs", value=False, reason="there is no CUDA here", source="by nature")


def _cudagraphs(facts: DeviceFacts) -> Decision:
    if facts.capability < (7, 5):
        return Decision(
            name="cudagraphs",
            value=False,
            reason="gradients were garbage (cosine 0) in reduce-overhead on a V100 with torch 2.0.1, and nobody "
            "tests cudagraphs on Volta since",
            source="the reference's compile matrix; pytorch#97253, #106321, #96693",
        )
    return Decision(
        name="cudagraphs",
        value=True,
        reason="allowed where a mode asks for them; gradient accumulation needs care",
        source="pytorch#169545",
    )


def _gemm_autotune(facts: DeviceFacts) -> Decision:
    why, source = _no_triton_gemm(facts)
    return Decision(
        name="triton_gemm_autotune",
        value=not why,
        reason=why or "allowed where a mode asks for it",
        source=source or "Triton has matrix instructions for this card",
    )


def _no_triton_gemm(facts: DeviceFacts) -> tuple[str, str]:
    """Why Inductor should not offer Triton's matrix products, with the source; empty where it may."""
    if not facts.triton:
        return "Triton is not installed", "the installed packages"
    if facts.capability < (8, 0) and _at_least(facts.triton, (3, 3)):
        return (
            f"Triton {facts.triton} has no matrix instructions below sm_80: tl.dot becomes scalar FMA, so "
            "its GEMM candidates cost compile time and never win",
            "offline compile for sm_70: 2,048 fma in place of mma; triton PR#5066, PR#5099",
        )
    if facts.capability < (7, 5) and _at_least(facts.triton, (2, 2)):
        return (
            f"Triton {facts.triton} on Volta: float16 tl.dot gave zeros, and 3.2 aborts where a reduction follows",
            "triton#4037, #3478; offline compile for sm_70",
        )
    return "", ""


def _bf16(facts: DeviceFacts) -> Decision:
    if facts.capability < (8, 0):
        return Decision(
            name="bf16",
            value=False,
            refuses=True,
            reason=f"sm_{facts.capability[0]}{facts.capability[1]} has no bfloat16 arithmetic: Inductor skips such "
            "a graph and runs it eagerly with one warning; use float16",
            source="torch._inductor.compile_fx, _check_triton_bf16_support; pytorch#118122",
        )
    return Decision(name="bf16", value=True, reason="the card computes in it", source="sm_80 and later")


def _kv_heads(facts: DeviceFacts) -> Decision:
    expand = facts.capability < (8, 0) and not _at_least(facts.torch, (2, 14))
    return Decision(
        name="expand_kv_heads",
        value=expand,
        reason="enable_gqa would fall to the math kernel below sm_80, O(S*S) memory: tc_volta's attention expands "
        "the heads itself, transformers' own sdpa does not"
        if expand
        else "a fused kernel takes grouped queries here",
        source="pytorch#154363, PR#191085 (native from torch 2.14)",
    )


def _cudnn(facts: DeviceFacts) -> Decision:
    return Decision(
        name="cudnn_version",
        value=f"{facts.cudnn // 10000}.{facts.cudnn // 100 % 100}",
        reason="cuDNN 9.11 and later dropped cards below sm_75: keep cuDNN at 9.10, or expect odd errors",
        source="pytorch#162574",
    )


def _at_least(version: str, least: tuple[int, int]) -> bool:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return numbers >= least if version else False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
