"""What is installed, and combinations that are known not to work."""

from __future__ import annotations

import platform

from harness.hardware import Inventory
from probes.doctor import installed
from probes.doctor.report import Line

TITLE = "versions"
_PLAIN = ("transformers", "msgspec", "numpy", "pandas", "matplotlib")
_CUDNN_WITHOUT_VOLTA = (9, 11)


def lines(found: Inventory) -> list[Line]:
    """Python, the packages, and the libraries that torch brings."""
    oldest = min((card.capability for card in found.cards if card.capability), default=None)
    rows = [Line(what="Python", value=platform.python_version()), _torch(), _triton()]
    rows += [*_cudnn(oldest), *_nccl(oldest), _xformers()]
    return rows + [_plain(name) for name in _PLAIN]


def _plain(name: str) -> Line:
    found = installed.version(name)
    if found is None:
        return Line(what=name, value="not installed", mark="problem", reason="run `make setup`")
    return Line(what=name, value=found)


def _torch() -> Line:
    torch, reason = installed.torch_or_reason()
    if torch is None:
        return Line(
            what="torch", value="does not import", mark="problem", reason=f"{reason}; run `make setup`"
        )
    return Line(what="torch", value=f"{torch.__version__}, {_build(torch.version.cuda)}")


def _build(cuda: str | None) -> str:
    return f"built for CUDA {cuda}" if cuda else "a CPU build"


def _triton() -> Line:
    found = installed.version("triton")
    if found is None:
        return Line(what="Triton", value="not installed", reason="a CPU build of torch brings none")
    return Line(what="Triton", value=found)


def _cudnn(oldest: tuple[int, int] | None) -> list[Line]:
    torch, _ = installed.torch_or_reason()
    if torch is None or not torch.version.cuda:
        return []
    number = torch.backends.cudnn.version()
    if number is None:
        return [Line(what="cuDNN", value="does not load", mark="note", reason="convolutions will fail")]
    release = (number // 10000, number // 100 % 100, number % 100)
    value = ".".join(map(str, release))
    if oldest is not None and oldest < (7, 5) and release[:2] >= _CUDNN_WITHOUT_VOLTA:
        reason = "9.11 and later dropped cards below sm_75: keep 9.10 (pytorch#162574)"
        return [Line(what="cuDNN", value=value, mark="problem", reason=reason)]
    return [Line(what="cuDNN", value=value)]


def _nccl(oldest: tuple[int, int] | None) -> list[Line]:
    torch, _ = installed.torch_or_reason()
    if torch is None:
        return []
    if not torch.version.cuda:
        return [Line(what="NCCL", value="none", reason="processes on a CPU talk through gloo")]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if oldest is not None and oldest < (7, 5) and installed.version("nvidia-nccl-cu13"):
        reason = "the CUDA 13 build has no kernels below sm_75; the CUDA 12 build has (2.32 too)"
        return [Line(what="NCCL", value=version, mark="problem", reason=reason)]
    return [Line(what="NCCL", value=version)]


def _xformers() -> Line:
    found = installed.version("xformers")
    if found is None:
        reason = "not needed: its CUTLASS kernel is torch's `efficient` (pip install -e '.[xformers]')"
        return Line(what="xformers", value="not installed", reason=reason)
    module, reason = installed.module_or_reason("xformers.ops")
    if module is None:
        return Line(what="xformers", value=f"{found}, does not import", mark="problem", reason=reason)
    return Line(what="xformers", value=f"{found}, imports")
