"""Machines that are not here: a fake sysfs and a fake nvidia-smi."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.hardware import Inventory, Runner, inventory

V100, P100, H200, TITAN_V, GT710, UNKNOWN = 0x1DB5, 0x15F9, 0x2335, 0x1D81, 0x128B, 0x3FFE


def bus(root: Path, *device_ids: int) -> Path:
    """A sysfs tree with these NVIDIA display devices, an audio function and another vendor's card."""
    for slot, device_id in enumerate(device_ids):
        _device(root / f"0000:{slot + 0x10:02x}:00.0", "0x10de", "0x030200", f"0x{device_id:04x}")
        _device(root / f"0000:{slot + 0x10:02x}:00.1", "0x10de", "0x040300", "0x10f2")
    _device(root / "0000:00:02.0", "0x8086", "0x030000", "0x4680")
    return root


def _device(folder: Path, vendor: str, kind: str, device: str) -> None:
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
        (folder / name).write_text(value + "\n")


def line(slot: int, device_id: int, name: str, driver: str, sm: str, memory: str = "32768") -> str:
    """One line as nvidia-smi prints it for our query."""
    return f"00000000:{slot + 0x10:02X}:00.0, 0x{device_id:04X}10DE, {name}, {driver}, {memory}, 300.00, {sm}"


def says(*lines: str) -> Runner:
    """An nvidia-smi that prints these lines."""
    return lambda command: "\n".join(lines) + "\n"


def fails(code: int, text: str) -> Runner:
    """An nvidia-smi that complains."""

    def run(command: list[str]) -> str:
        raise subprocess.CalledProcessError(code, command, text)

    return run


def absent(command: list[str]) -> str:
    """A machine without nvidia-smi."""
    raise FileNotFoundError(2, "No such file or directory", command[0])


def machine(root: Path, *device_ids: int, smi: Runner = absent) -> Inventory:
    """What `harness.hardware` finds on such a machine."""
    return inventory(bus(root / "devices", *device_ids), smi)
