"""An NVML with cards that are not here: the part of pynvml that the doctor asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's: every refusal is one of these."""


@dataclass(frozen=True, kw_only=True)
class FakeCard:
    """One card; `links` maps link number to the bus id at its far end, "" for a link that is down."""

    name: str = "Tesla V100-SXM2-32GB"
    bus_id: str = "00000000:10:00.0"
    capability: tuple[int, int] = (7, 0)
    limit_w: int = 300
    default_w: int = 300
    width: int = 16
    links: dict[int, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()


class FakeNvml:
    """Stands in for the module `pynvml`."""

    NVMLError = NVMLError

    def __init__(self, *cards: FakeCard, init: str = "") -> None:
        self.cards, self.init, self.closed = cards, init, False

    def nvmlInit(self) -> None:
        if self.init:
            raise NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(free=31 << 30, total=32 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in card.pids]

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        return card.limit_w * 1000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, card: FakeCard) -> int:
        return card.default_w * 1000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: FakeCard) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:
        return 3

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:
        return card.width

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:
        return 16

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetNvLinkState(self, card: FakeCard, link: int) -> int:
        if link not in card.links:
            raise NVMLError("Invalid Argument")
        return int(bool(card.links[link]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, card: FakeCard, link: int) -> int:
        return 2 if card.links[link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: FakeCard, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=card.links[link])

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(busId=card.bus_id)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: FakeCard, other: FakeCard) -> int:
        return 50


def v100s(count: int) -> Iterator[FakeCard]:
    """A ring of V100s, two NVLinks to each neighbour; the address is written short, as some drivers do."""
    ids = [f"{slot + 0x10:02x}:00.0" for slot in range(count)]
    for i in range(count):
        near = (ids[(i + 1) % count], ids[(i - 1) % count])
        links = {0: near[0], 1: near[0], 2: near[1], 3: near[1]}
        full = {link: f"0000:{bus}" for link, bus in links.items()}
        yield FakeCard(bus_id=f"00000000:{ids[i].upper()}", links=full)
