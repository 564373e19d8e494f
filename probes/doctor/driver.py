"""What NVML says of each card: memory, power limit, PCIe link, NVLink, and who is connected to whom.

Every query is answered on its own: a card that does not know NVLink still has its power limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TypeVar

import msgspec

from harness.hardware import Inventory
from harness.wheels import choose
from probes.doctor import installed
from probes.doctor.host import gib
from probes.doctor.report import Line

TITLE = "driver and cards"
_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS; a number past a card's own is refused
T = TypeVar("T")


def lines(found: Inventory, nvml: ModuleType | None = None) -> list[Line]:
    """The driver, every card, and the topology of several."""
    module, reason = (nvml, "") if nvml is not None else installed.module_or_reason("pynvml")
    if module is None:
        return [
            Line(what="NVML", value="no nvidia-ml-py", mark="problem", reason=f"{reason}; run `make setup`")
        ]
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return [_no_driver(found, str(error))]
    try:
        handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
        rows = [_driver(module), *_merged([_card(module, handle) for handle in handles])]
        return rows + (_topology(module, handles) if len(handles) > 1 else [])
    finally:
        module.nvmlShutdown()


def _merged(cards: list[list[Line]]) -> list[Line]:
    """Cards that answer alike share a line: `GPU 0-7 power limit`."""
    alike: dict[Line, list[int]] = {}
    for index, answers in enumerate(cards):
        for line in answers:
            alike.setdefault(line, []).append(index)
    order = list(dict.fromkeys(line.what for answers in cards for line in answers))
    ranked = sorted(alike.items(), key=lambda item: (order.index(item[0].what), item[1]))
    return [
        msgspec.structs.replace(line, what=f"GPU {span(indices)} {line.what}".rstrip())
        for line, indices in ranked
    ]


def span(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _no_driver(found: Inventory, error: str) -> Line:
    if not found.cards:
        return Line(
            what="driver", value="none", reason="no NVIDIA card on the PCI bus: everything runs on the CPU"
        )
    about = [text for text in choose(found).warnings if "driver" in text] or [error]
    return Line(what="driver", value=f"none ({error})", mark="problem", reason="; ".join(about))


def _driver(nvml: ModuleType) -> Line:
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    value = f"{nvml.nvmlSystemGetDriverVersion()}, serves CUDA up to {number // 1000}.{number % 1000 // 10}"
    return Line(what="driver", value=value)


def _card(nvml: ModuleType, handle: object) -> list[Line]:
    queries = (_name, _memory, _processes, _power, _pcie, _nvlink, _mig)
    answers = [_asked(nvml, partial(query, nvml, handle)) for query in queries]
    return [line for line in answers if line is not None]


def _asked(nvml: ModuleType, query: Callable[[], T]) -> T | None:
    """The answer, or None where this card or driver does not know the question."""
    try:
        return query()
    except nvml.NVMLError:
        return None


def _name(nvml: ModuleType, handle: object) -> Line:
    capability = "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    total = gib(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Line(what="", value=f"{nvml.nvmlDeviceGetName(handle)}, capability {capability}, {total}")


def _memory(nvml: ModuleType, handle: object) -> Line | None:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    if memory.free > 0.95 * memory.total:
        return None  # the driver itself keeps some hundred MiB
    return Line(what="memory", value=f"{gib(memory.free)} free", mark="note", reason="the rest is in use now")


def _processes(nvml: ModuleType, handle: object) -> Line | None:
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if not running:
        return None
    pids = ", ".join(str(process.pid) for process in running[:4])
    return Line(
        what="processes", value=f"{len(running)} (pid {pids})", mark="note", reason="timings will suffer"
    )


def _power(nvml: ModuleType, handle: object) -> Line:
    limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    if limit < default:
        reason = f"below the default of {default:.0f} W: slower than figures from others; nvidia-smi -pl {default:.0f}"
        return Line(what="power limit", value=f"{limit:.0f} W", mark="note", reason=reason)
    return Line(what="power limit", value=f"{limit:.0f} W")


def _pcie(nvml: ModuleType, handle: object) -> Line:
    generation, width = (
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
    )
    best, widest = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    what, value = "PCIe", f"gen {generation} x{width} (of gen {best} x{widest})"
    if width < widest:
        reason = "fewer lanes than the card and slot could: offload and gradient exchange suffer; reseat, or the board"
        return Line(what=what, value=value, mark="note", reason=reason)
    return Line(what=what, value=value, reason="an idle link slows down" if generation < best else "")


def _nvlink(nvml: ModuleType, handle: object) -> Line | None:
    states = [state for link in range(_MAX_LINKS) if (state := _link(nvml, handle, link)) is not None]
    if not states:
        return None
    what, value = "NVLink", f"{sum(states)} of {len(states)} links up"
    if not any(states):
        return Line(what=what, value=value, mark="note", reason="the cards reach each other over PCIe only")
    if not all(states):
        down = ", ".join(str(link) for link, state in enumerate(states) if not state)
        reason = (
            f"down: {down}. Unused links of a board are down too; compare the cards. NCCL 2.10 corrupted "
            "data on a V100 board with one link down (nccl#596)"
        )
        return Line(what=what, value=value, mark="note", reason=reason)
    return Line(what=what, value=value)


def _link(nvml: ModuleType, handle: object, link: int) -> bool | None:
    state = _asked(nvml, lambda: nvml.nvmlDeviceGetNvLinkState(handle, link))
    return None if state is None else bool(state)


def _mig(nvml: ModuleType, handle: object) -> Line | None:
    current, _ = nvml.nvmlDeviceGetMigMode(handle)
    if not current:
        return None
    reason = (
        "a process sees one slice of the card, and slices cannot reach each other: no context parallelism"
    )
    return Line(what="MIG", value="on", mark="note", reason=reason)


def _topology(nvml: ModuleType, handles: list[object]) -> list[Line]:
    """One row of `nvidia-smi topo -m` per card: NVLinks between two cards, or the nearest common bridge."""
    rows = []
    for i, one in enumerate(handles):
        cells = ["X" if i == j else _between(nvml, one, other) for j, other in enumerate(handles)]
        rows.append(
            Line(
                what=f"GPU {i} to GPU {span(list(range(len(handles))))}",
                value=" ".join(f"{c:>4}" for c in cells),
            )
        )
    if any("SYS" in row.value for row in rows):
        reason = (
            "SYS crosses the CPU sockets: put cards that exchange most on one side (CUDA_VISIBLE_DEVICES)"
        )
        rows.append(Line(what="topology", value="more than one island", mark="note", reason=reason))
    return rows


def _between(nvml: ModuleType, one: object, other: object) -> str:
    links = _links_between(nvml, one, other)
    if links:
        return f"NV{links}"
    level = _asked(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    # NVML_TOPOLOGY_*: one board, one switch, several switches, host bridge, NUMA node, system
    return {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}.get(
        -1 if level is None else level, "?"
    )


def _links_between(nvml: ModuleType, one: object, other: object) -> int:
    target = _pci(nvml.nvmlDeviceGetPciInfo(other).busId)
    remotes = Counter(_remote(nvml, one, link) for link in range(_MAX_LINKS) if _link(nvml, one, link))
    return remotes[target] or remotes["switch"]


def _remote(nvml: ModuleType, handle: object, link: int) -> str:
    """The PCI address at the far end of a link; "switch" for an NVSwitch, which reaches every card."""
    kind = _asked(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    if kind == 2:  # NVML_NVLINK_DEVICE_TYPE_SWITCH
        return "switch"
    info = _asked(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return "" if info is None else _pci(info.busId)


def _pci(bus_id: str | bytes) -> str:
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    return text.lower().rjust(16, "0")
