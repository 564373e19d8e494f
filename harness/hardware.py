"""Which NVIDIA cards this machine has, and what is known of each. Standard library only.

It runs before anything is installed (`python3 -m harness.hardware`), under any Python from 3.10 on. Two
sources are merged by PCI address: what `nvidia-smi` says, where a driver answers, and the PCI bus, which
also shows the cards that no driver serves. Every unknown has its reason in `Card.unknown`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
Capability = tuple[int, int]
Runner = Callable[[list[str]], str]  # arguments -> standard output; raises OSError or SubprocessError

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_FIELDS = ("pci.bus_id", "pci.device_id", "name", "driver_version", "memory.total", "power.limit")
_MIB = 1 << 20

# First and last device id, family, chip, capability; source: pci.ids and the driver's list of products.
_CHIPS: tuple[tuple[int, int, str, str, Capability], ...] = (
    (0x0FC0, 0x0FFF, "Kepler", "GK107", (3, 0)),
    (0x1000, 0x102C, "Kepler", "GK110", (3, 5)),
    (0x102D, 0x102D, "Kepler", "GK210", (3, 7)),
    (0x102E, 0x103F, "Kepler", "GK110", (3, 5)),
    (0x1180, 0x11FF, "Kepler", "GK104/GK106", (3, 0)),
    (0x1280, 0x12BF, "Kepler", "GK208", (3, 5)),
    (0x1340, 0x13BF, "Maxwell", "GM107/GM108", (5, 0)),
    (0x13C0, 0x143F, "Maxwell", "GM204/GM206", (5, 2)),
    (0x15F0, 0x15FF, "Pascal", "GP100", (6, 0)),
    (0x17C0, 0x17FF, "Maxwell", "GM200", (5, 2)),
    (0x1B00, 0x1D7F, "Pascal", "GP102-GP108", (6, 1)),
    (0x1D80, 0x1DFF, "Volta", "GV100", (7, 0)),
    (0x1E00, 0x1FFF, "Turing", "TU102-TU117", (7, 5)),
    (0x2080, 0x20FF, "Ampere", "GA100", (8, 0)),
    (0x2180, 0x21FF, "Turing", "TU116", (7, 5)),
    (0x2200, 0x228F, "Ampere", "GA102", (8, 6)),
    (0x2300, 0x23FF, "Hopper", "GH100", (9, 0)),
    (0x2400, 0x25FF, "Ampere", "GA103-GA107", (8, 6)),
    (0x2600, 0x28FF, "Ada", "AD102-AD107", (8, 9)),
    (0x2900, 0x29FF, "Blackwell", "GB100", (10, 0)),
    (0x2B80, 0x2DFF, "Blackwell", "GB202-GB207", (12, 0)),
    (0x2F00, 0x2F7F, "Blackwell", "GB205", (12, 0)),
    (0x3180, 0x31FF, "Blackwell", "GB110", (10, 3)),
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card. `None` means unknown, and `unknown` says why, by field name."""

    name: str
    pci_address: str  # as in sysfs: "0000:3b:00.0"
    device_id: int | None = None
    family: str = ""
    capability: Capability | None = None
    driver: str | None = None  # version of the driver that serves this card
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def sm(self) -> str:
        """`sm_70`, or `sm_?` for an unknown card."""
        return "sm_{}{}".format(*self.capability) if self.capability else "sm_?"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All cards, in PCI order. `no_driver` says why no driver answered; empty if one did."""

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    no_driver: str = ""


def inventory(pci_devices: Path = PCI_DEVICES, run: Runner | None = None) -> Inventory:
    """The cards of this machine, or of the fake one a test describes."""
    on_bus = {card.pci_address: card for card in _scan_bus(pci_devices)}
    served, no_driver = _ask_driver(run or _run)
    silent = no_driver or "the driver does not list this card"
    for address, card in on_bus.items():
        on_bus[address] = replace(card, unknown={**_unserved(silent), **card.unknown})
    cards = on_bus | {card.pci_address: card for card in served}
    driver = next((card.driver for card in served if card.driver), None)
    ordered = tuple(cards[address] for address in sorted(cards))
    return Inventory(cards=ordered, driver=driver, no_driver=no_driver)


def identify(device_id: int) -> tuple[str, str, Capability | None]:
    """(name, family, capability) from a PCI device id; an honest "unknown" outside the table."""
    for first, last, family, chip, capability in _CHIPS:
        if first <= device_id <= last:
            return f"{family} {chip} (10de:{device_id:04x})", family, capability
    return f"unknown NVIDIA device 10de:{device_id:04x}", "", None


def _scan_bus(pci_devices: Path) -> list[Card]:
    try:
        folders = sorted(pci_devices.iterdir())
    except OSError:
        return []  # no sysfs: a container, or not Linux; the driver's list is all there is
    return [card for folder in folders if (card := _card_on_bus(folder)) is not None]


def _card_on_bus(folder: Path) -> Card | None:
    if _attribute(folder, "vendor") != _VENDOR or not _attribute(folder, "class").startswith(_DISPLAY_CLASS):
        return None
    try:
        device_id = int(_attribute(folder, "device"), 16)
    except ValueError:
        return Card(name="NVIDIA device without a PCI id", pci_address=folder.name)
    name, family, capability = identify(device_id)
    unknown = {} if capability else {"capability": "its PCI id is not in this program's table"}
    return Card(
        name=name,
        pci_address=folder.name,
        device_id=device_id,
        family=family,
        capability=capability,
        unknown=unknown,
    )


def _attribute(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text().strip().lower()
    except OSError:
        return ""


def _unserved(reason: str) -> dict[str, str]:
    return dict.fromkeys(("driver", "memory_bytes", "power_limit_w"), reason)


def _ask_driver(run: Runner) -> tuple[list[Card], str]:
    """The cards that the driver serves, or why there is no answer."""
    try:
        try:
            text = _query(run, (*_FIELDS, "compute_cap"))
        except subprocess.CalledProcessError as error:
            if "compute_cap" not in str(error.output):
                raise
            text = _query(run, _FIELDS)  # drivers before 495 do not know that field
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except subprocess.CalledProcessError as error:
        return [], f"nvidia-smi: {_first_line(error.output) or f'exit {error.returncode}'}"
    except subprocess.TimeoutExpired as error:
        return [], f"nvidia-smi: no answer within {error.timeout:g} s"
    except OSError as error:
        return [], f"nvidia-smi: {error.strerror or error}"
    cards = [card for line in text.splitlines() if (card := _served_card(line)) is not None]
    return cards, "" if cards else f"nvidia-smi lists no card: {_first_line(text) or 'no output'}"


def _query(run: Runner, fields: tuple[str, ...]) -> str:
    return run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    if done.returncode:
        # It writes its complaints to standard output; loader errors go to standard error.
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout or done.stderr)
    return done.stdout


def _first_line(text: object) -> str:
    return next((line.strip()[:160] for line in str(text or "").splitlines() if line.strip()), "")


def _served_card(line: str) -> Card | None:
    """One line of the driver's table, or None for a line that is not one."""
    values = [value.strip() for value in line.split(",")]
    address = re.fullmatch(r"([0-9A-Fa-f]{4,8})(:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)", values[0])
    if address is None or len(values) < len(_FIELDS):
        return None
    device_id = _device_id(values[1])
    _, family, from_id = identify(device_id) if device_id is not None else ("", "", None)
    told = re.fullmatch(r"(\d+)\.(\d+)", values[6]) if len(values) > len(_FIELDS) else None
    memory, power = _number(values[4]), _number(values[5])
    card = Card(
        name=values[2],
        pci_address=f"{int(address[1], 16):04x}{address[2].lower()}",  # sysfs writes a shorter domain
        device_id=device_id,
        family=family,
        capability=(int(told[1]), int(told[2])) if told else from_id,
        driver=values[3] if re.match(r"\d+\.", values[3]) else None,
        memory_bytes=None if memory is None else round(memory * _MIB),
        power_limit_w=power,
    )
    missing = {"memory_bytes": values[4], "power_limit_w": values[5], "driver": values[3]}
    unknown = {
        name: f"nvidia-smi says {told!r}" for name, told in missing.items() if getattr(card, name) is None
    }
    if card.capability is None:
        unknown["capability"] = "neither the driver nor this program's table knows it"
    return replace(card, unknown=unknown)


def _device_id(text: str) -> int | None:
    """`0x1DB110DE` holds the device in its upper half and the vendor in its lower one."""
    match = re.fullmatch(r"0x([0-9A-Fa-f]{4})10[dD][eE]", text)
    return int(match[1], 16) if match else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _describe(card: Card) -> str:
    memory = f"{card.memory_bytes / (1 << 30):.1f} GiB" if card.memory_bytes else "memory unknown"
    driver = (
        f"driver {card.driver}" if card.driver else f"no driver ({card.unknown.get('driver', 'unknown')})"
    )
    return f"{card.pci_address}  {card.name}, {card.sm}, {memory}, {driver}"


def main() -> int:
    """Print the cards, one a line."""
    found = inventory()
    for card in found.cards:
        print(_describe(card))
    if not found.cards:
        print(f"no NVIDIA card on the PCI bus; {found.no_driver}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
