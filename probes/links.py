"""How fast one card reaches another, by their makers' figures for the links that NVML reports. No torch."""

from __future__ import annotations

from typing import NamedTuple

# GB/s in one direction. NVLink: of one link, by its version as NVML reports it; NVIDIA's white papers of the P100,
# V100, A100 and H100. PCIe: of a lane, after its encoding; PCI-SIG.
_NVLINK = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
ASSUMED_GB_S = 16 * _PCIE_LANE[3]
_MAX_LINKS = 18


class Link(NamedTuple):
    """GB/s that one rank can send to another, and where the figure comes from."""

    gb_s: float
    source: str


def link_here() -> Link:
    """The link of the first card, as the driver reports it; PCIe 3.0 x16 where nothing can be asked, and it says so."""
    assumed = Link(ASSUMED_GB_S, "no topology to read: PCIe 3.0 x16 assumed")
    try:
        import pynvml
    except ImportError:
        return assumed
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return assumed
    try:
        return _nvlink(pynvml) or _pcie(pynvml)
    except pynvml.NVMLError as error:
        return Link(ASSUMED_GB_S, f"{error}: PCIe 3.0 x16 assumed")
    finally:
        pynvml.nvmlShutdown()


def _nvlink(nvml: object) -> Link | None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)  # type: ignore[attr-defined]
    up, version = 0, 0
    for number in range(_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, number):  # type: ignore[attr-defined]
                up, version = up + 1, int(nvml.nvmlDeviceGetNvLinkVersion(handle, number))  # type: ignore[attr-defined]
        except nvml.NVMLError:  # type: ignore[attr-defined]  # a link that this card has not
            continue
    if not up or version not in _NVLINK:
        return None
    return Link(up * _NVLINK[version], f"{up} links of NVLink version {version}")


def _pcie(nvml: object) -> Link:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)  # type: ignore[attr-defined]
    generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)  # type: ignore[attr-defined]
    width = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)  # type: ignore[attr-defined]
    return Link(width * _PCIE_LANE.get(generation, _PCIE_LANE[3]), f"PCIe {generation}.0 x{width}")
