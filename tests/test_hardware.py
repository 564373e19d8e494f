"""Cards are found with and without a driver, and everything unknown has its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.hardware import identify, inventory
from tests import fake_machine as fake
from tests.conftest import ROOT


def test_a_card_without_a_driver_is_known_by_its_pci_id(tmp_path: Path) -> None:
    found = fake.machine(tmp_path, fake.V100)
    (card,) = found.cards
    assert (card.family, card.capability, card.sm) == ("Volta", (7, 0), "sm_70")
    assert card.name == "Volta GV100 (10de:1db5)"
    assert card.driver is None
    assert card.unknown["driver"] == found.no_driver == "nvidia-smi is not installed"


def test_the_driver_tells_name_memory_and_power_limit(tmp_path: Path) -> None:
    smi = fake.says(fake.line(0, fake.V100, "Tesla V100-SXM2-32GB", "580.65.06", "7.0"))
    found = fake.machine(tmp_path, fake.V100, smi=smi)
    (card,) = found.cards
    assert (card.name, card.driver, card.memory_bytes) == ("Tesla V100-SXM2-32GB", "580.65.06", 32 << 30)
    assert card.power_limit_w == 300.0
    assert not card.unknown
    assert (found.driver, found.no_driver) == ("580.65.06", "")


def test_a_card_that_the_driver_dropped_stays_in_the_list(tmp_path: Path) -> None:
    smi = fake.says(fake.line(1, fake.H200, "NVIDIA H200", "590.44.01", "9.0"))
    found = fake.machine(tmp_path, fake.V100, fake.H200, smi=smi)
    assert [card.sm for card in found.cards] == ["sm_70", "sm_90"]
    assert found.cards[0].unknown["driver"] == "the driver does not list this card"


def test_a_container_without_sysfs_has_the_drivers_list(tmp_path: Path) -> None:
    smi = fake.says(fake.line(0, fake.H200, "NVIDIA H200", "580.65.06", "9.0"))
    assert [card.name for card in inventory(tmp_path / "none", smi).cards] == ["NVIDIA H200"]


def test_an_old_driver_that_does_not_know_compute_cap_is_asked_again(tmp_path: Path) -> None:
    def smi(command: list[str]) -> str:
        if "compute_cap" in command[1]:
            raise subprocess.CalledProcessError(
                2, command, 'Field "compute_cap" is not a valid field to query.'
            )
        return fake.line(0, fake.V100, "Tesla V100-SXM2-32GB", "470.256.02", "7.0").rsplit(",", 1)[0]

    (card,) = fake.machine(tmp_path, fake.V100, smi=smi).cards
    assert (card.driver, card.capability) == ("470.256.02", (7, 0))


def test_a_value_that_the_driver_withholds_is_unknown_with_its_word(tmp_path: Path) -> None:
    smi = fake.says(fake.line(0, fake.V100, "Tesla V100", "580.65.06", "7.0", memory="[N/A]"))
    (card,) = fake.machine(tmp_path, fake.V100, smi=smi).cards
    assert card.memory_bytes is None
    assert card.unknown == {"memory_bytes": "nvidia-smi says '[N/A]'"}


def test_an_unknown_device_is_called_so(tmp_path: Path) -> None:
    (card,) = fake.machine(tmp_path, fake.UNKNOWN).cards
    assert (card.name, card.sm) == ("unknown NVIDIA device 10de:3ffe", "sm_?")
    assert "capability" in card.unknown


def test_no_card_is_an_empty_list(tmp_path: Path) -> None:
    assert fake.machine(tmp_path).cards == ()


@pytest.mark.parametrize("text", ["", "No devices were found", "\x00\x01,,,,", "a, b\n", "1,2,3,4,5,6,7"])
def test_garbage_from_nvidia_smi_is_quoted_and_not_believed(tmp_path: Path, text: str) -> None:
    found = fake.machine(tmp_path, fake.V100, smi=fake.says(text))
    assert [card.sm for card in found.cards] == ["sm_70"]
    assert found.no_driver.startswith("nvidia-smi lists no card: ")


def test_a_failing_nvidia_smi_is_the_reason(tmp_path: Path) -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMore."
    found = fake.machine(tmp_path, fake.V100, smi=fake.fails(9, text))
    assert found.no_driver == f"nvidia-smi: {text.splitlines()[0]}"


def test_a_hanging_nvidia_smi_is_the_reason(tmp_path: Path) -> None:
    def smi(command: list[str]) -> str:
        raise subprocess.TimeoutExpired(command, 20)

    assert fake.machine(tmp_path, fake.V100, smi=smi).no_driver == "nvidia-smi: no answer within 20 s"


def test_a_long_pci_domain_is_written_as_sysfs_does(tmp_path: Path) -> None:
    text = fake.line(0, fake.H200, "NVIDIA H200", "580.65.06", "9.0").replace("00000000:", "00010001:")
    (card,) = inventory(tmp_path, fake.says(text)).cards
    assert card.pci_address == "10001:10:00.0"


# Ids from the public list of PCI ids.
@pytest.mark.parametrize(
    ("device_id", "sm"),
    [
        (0x1D81, (7, 0)),  # Titan V
        (0x1DB1, (7, 0)),  # V100 SXM2 16 GB
        (0x1DBA, (7, 0)),  # Quadro GV100
        (0x1DF6, (7, 0)),  # V100S
        (0x1DB4, (7, 0)),  # V100 PCIe
        (0x15F8, (6, 0)),  # P100 PCIe
        (0x1B38, (6, 1)),  # P40
        (0x17FD, (5, 2)),  # M40
        (0x102D, (3, 7)),  # K80
        (0x1EB8, (7, 5)),  # T4
        (0x2182, (7, 5)),  # GTX 1660 Ti
        (0x20B2, (8, 0)),  # A100 SXM4 80 GB
        (0x2204, (8, 6)),  # RTX 3090
        (0x2235, (8, 6)),  # A40
        (0x2684, (8, 9)),  # RTX 4090
        (0x27B8, (8, 9)),  # L4
        (0x2330, (9, 0)),  # H100 SXM5
        (0x2335, (9, 0)),  # H200
        (0x2901, (10, 0)),  # B200
        (0x2B85, (12, 0)),  # RTX 5090
        (0x0020, None),  # Riva TNT
    ],
)
def test_known_products_have_their_capability(device_id: int, sm: tuple[int, int] | None) -> None:
    assert identify(device_id)[2] == sm


@pytest.mark.parametrize("module", ["harness.hardware", "harness.wheels", "harness.setup_check"])
def test_set_up_needs_nothing_but_the_standard_library(module: str) -> None:
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}} - sys.stdlib_module_names)"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"__main__", "harness"}
