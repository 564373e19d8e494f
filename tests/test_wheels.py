"""The set has kernels for the oldest card; what does not work yet is said with its remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.setup_check import main, message, missing
from harness.wheels import SETS, Choice, choose, has_kernels
from tests import fake_machine as fake
from tests.conftest import ROOT

DEFAULT, VOLTA = "requirements/default.txt", "requirements/volta.txt"
V100_LINE = fake.line(0, fake.V100, "Tesla V100-SXM2-32GB", "580.65.06", "7.0")


def _h200(slot: int, driver: str) -> str:
    return fake.line(slot, fake.H200, "NVIDIA H200", driver, "9.0")


def _choice(tmp_path: Path, *ids: int, smi: fake.Runner = fake.absent) -> Choice:
    return choose(fake.machine(tmp_path, *ids, smi=smi))


def test_no_card_means_cpu(tmp_path: Path) -> None:
    choice = _choice(tmp_path)
    assert choice == Choice(constraints_file=DEFAULT, reason="no NVIDIA card: CPU")


def test_a_v100_gets_the_volta_set(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.V100, smi=fake.says(V100_LINE))
    assert choice.constraints_file == VOLTA
    assert choice.reason == "torch 2.10.0 (CUDA 12.8) has kernels for Tesla V100-SXM2-32GB, sm_70"
    assert choice.warnings == ()


def test_a_v100_without_a_driver_gets_the_set_and_the_remedy(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.V100, fake.V100)
    assert choice.constraints_file == VOLTA
    assert choice.warnings == (
        "a V100 is here but no driver serves it (nvidia-smi is not installed): "
        "install the 580 branch (newer branches drop Volta)",
    )


def test_a_v100_under_a_newer_branch_that_serves_nothing(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.V100, smi=fake.says("No devices were found"))
    assert choice.constraints_file == VOLTA
    assert "install the 580 branch" in choice.warnings[0]


def test_a_v100_that_branch_590_dropped_beside_an_h200(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.V100, fake.H200, smi=fake.says(_h200(1, "590.44.01")))
    assert choice.constraints_file == VOLTA
    assert choice.warnings == (
        "a V100 is here but driver 590.44.01 does not serve it: install the 580 branch (newer branches drop Volta)",
    )


def test_cards_that_a_container_hides_are_one_warning(tmp_path: Path) -> None:
    choice = _choice(tmp_path, *[fake.H200] * 8, smi=fake.says(_h200(3, "580.65.06")))
    assert choice.constraints_file == DEFAULT
    assert choice.warnings == (
        "Hopper GH100 (10de:2335) is on the PCI bus but not in the driver's list: "
        "hidden from this container, or broken",
    )


def test_a_mixed_machine_gets_the_set_that_serves_both(tmp_path: Path) -> None:
    smi = fake.says(V100_LINE, _h200(1, "580.65.06"))
    choice = _choice(tmp_path, fake.V100, fake.H200, smi=smi)
    assert choice.constraints_file == VOLTA
    assert choice.reason.endswith("sm_70, the oldest of sm_70, sm_90")
    volta = next(one for one in SETS if one.constraints_file == VOLTA)
    assert has_kernels(volta.kernels, (7, 0))
    assert has_kernels(volta.kernels, (9, 0))


def test_a_modern_card_gets_the_default_set(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.H200, smi=fake.says(_h200(0, "580.65.06")))
    assert (choice.constraints_file, choice.warnings) == (DEFAULT, ())


def test_a_driver_too_old_for_cuda_13_gets_the_cuda_12_set(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.H200, smi=fake.says(_h200(0, "570.86.10")))
    assert choice.constraints_file == VOLTA
    assert choice.reason.startswith("driver 570.86.10 is too old for torch 2.13.0 (CUDA 13.0 needs 580)")


def test_a_driver_that_runs_by_minor_version_compatibility_is_noted(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.H200, smi=fake.says(_h200(0, "535.183.01")))
    assert choice.constraints_file == VOLTA
    assert "minor-version compatibility" in choice.warnings[0]


def test_a_driver_too_old_for_every_set_is_named(tmp_path: Path) -> None:
    smi = fake.says(V100_LINE.replace("580.65.06", "470.256.02"))
    choice = _choice(tmp_path, fake.V100, smi=smi)
    assert choice.constraints_file == VOLTA
    assert choice.warnings == (
        "driver 470.256.02 is too old for torch 2.10.0: CUDA 12.8 needs branch 525 or newer",
    )


def test_a_p100_alone_means_cpu_and_names_the_variant_that_would_serve_it(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.P100)
    assert choice.constraints_file == DEFAULT
    assert choice.reason == "no set has kernels for this machine's cards: CPU"
    assert "CUDA 12.6 index variant (cu126) of torch 2.11 to 2.14 has them" in choice.warnings[0]


def test_an_old_display_card_beside_an_h200_is_left_out(tmp_path: Path) -> None:
    smi = fake.says(_h200(1, "580.65.06"))
    choice = _choice(tmp_path, fake.GT710, fake.H200, smi=smi)
    assert choice.constraints_file == DEFAULT
    assert choice.warnings == (
        "Kepler GK208 (10de:128b), sm_35: neither set has kernels for it; "
        "no torch that this project supports has them",
    )


def test_an_unknown_card_is_not_guessed(tmp_path: Path) -> None:
    choice = _choice(tmp_path, fake.UNKNOWN)
    assert choice.constraints_file == DEFAULT
    assert choice.reason == "the card is unknown: newest set"
    assert "unknown NVIDIA device 10de:3ffe" in choice.warnings[0]


@pytest.mark.parametrize(
    ("card", "runs"), [((8, 9), True), ((12, 1), True), ((7, 0), False), ((7, 5), True), ((11, 0), False)]
)
def test_a_kernel_runs_on_higher_minors_of_its_major_only(card: tuple[int, int], runs: bool) -> None:
    assert has_kernels(SETS[0].kernels, card) is runs


def test_each_set_pins_the_torch_that_the_table_names() -> None:
    for one in SETS:
        assert f"\ntorch=={one.torch}\n" in (ROOT / one.constraints_file).read_text()


def test_the_file_goes_to_make_and_the_reason_to_the_person() -> None:
    command = [sys.executable, "-m", "harness.wheels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in (DEFAULT, VOLTA)
    assert done.stderr.startswith(done.stdout.strip() + ": ")


def test_one_message_names_everything_that_is_missing(tmp_path: Path) -> None:
    found = missing(
        version=(3, 9), include=tmp_path, has_module=lambda name: False, which=lambda name: None, environ={}
    )
    text = message(found)
    assert text.startswith("This machine lacks 4 things")
    for word in (
        "Python 3.10",
        "venv and ensurepip",
        "python3.9-dev",
        "Python.h",
        "C++ compiler",
        "conda",
        "dnf",
    ):
        assert word in text


def test_a_compiler_that_cxx_names_counts_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()

    def lacking(cxx: str) -> list[str]:
        paths = {"/opt/clang++": "/opt/clang++", "c++": "/usr/bin/c++"}
        found = missing(
            include=tmp_path,
            has_module=lambda name: True,
            which=paths.get,
            environ={"CXX": cxx} if cxx else {},
        )
        return [one.what for one in found]

    assert lacking("") == []
    assert lacking("/opt/clang++ -stdlib=libc++") == []
    assert lacking("icpc") == ["the C++ compiler that CXX names (icpc)"]


def test_a_machine_that_lacks_something_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main() == 2
    assert "no-such-compiler" in capsys.readouterr().err
