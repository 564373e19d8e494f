"""The doctor gives a page on every machine, and a problem says what to do."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from probes import doctor
from probes.doctor import compilers, decisions, driver, host, installed, kernels, versions, wheel
from probes.doctor.report import Line, Report, Section
from tests import fake_machine as fake
from tests.conftest import ROOT
from tests.fake_nvml import FakeCard, FakeNvml, v100s

V100_LINE = fake.line(0, fake.V100, "Tesla V100-SXM2-32GB", "580.65.06", "7.0")
H200_LINE = fake.line(0, fake.H200, "NVIDIA H200", "580.65.06", "9.0")
FLAGS_210 = "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
FLAGS_213 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


def _torch(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, flags: str, devices: int) -> None:
    """Pretend that this torch is installed."""
    inner = SimpleNamespace(**({"_cuda_getArchFlags": lambda: flags} if cuda else {}))
    module = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda), _C=inner)
    monkeypatch.setattr(installed, "torch_or_reason", lambda: (module, ""))
    monkeypatch.setattr(installed, "cuda_state", lambda: (devices, ""))


def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "ModuleNotFoundError: No module named 'torch'"
    monkeypatch.setattr(installed, "torch_or_reason", lambda: (None, reason))
    monkeypatch.setattr(installed, "cuda_state", lambda: (0, reason))


def _line(lines: list[Line], what: str) -> Line:
    (found,) = [line for line in lines if line.what == what]
    return found


def test_this_machine_is_examined_within_seconds_and_renders_at_80_columns() -> None:
    began = time.monotonic()
    console = Console(file=io.StringIO(), width=80)
    doctor.render(doctor.examine(), console)
    assert time.monotonic() - began < 15
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for title in (host.TITLE, driver.TITLE, wheel.TITLE, versions.TITLE, compilers.TITLE):
        assert f"\n{title}\n" in f"\n{text}"
    assert "broke" not in text


def test_json_is_the_report_and_the_exit_is_1_exactly_when_there_is_a_problem() -> None:
    console = Console(file=io.StringIO(), width=80)
    code = doctor.main(console, as_json=True)
    report = msgspec.json.decode(console.file.getvalue(), type=Report)  # type: ignore[attr-defined]
    assert code == int(bool(report.marked("problem")))
    assert len(report.sections) == 7


def test_importing_the_doctor_imports_no_torch() -> None:
    code = "import sys, probes.doctor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "xformers", "pynvml"} & set(done.stdout.split())


def test_a_part_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "lines", lambda: 1 / 0)
    report = doctor.examine()
    assert report.sections[0].lines[0].reason == "ZeroDivisionError: division by zero"
    assert len(report.sections[1].lines) > 0


def test_a_problem_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="a problem without a reason"):
        Line(what="x", value="y", mark="problem")


def test_the_page_of_a_v100_that_torch_has_no_kernels_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake.machine(tmp_path, fake.V100, smi=fake.says(V100_LINE))
    _torch(monkeypatch, "2.13.0+cu130", "13.0", FLAGS_213, 1)
    report = Report(sections=(Section(title=wheel.TITLE, lines=tuple(wheel.lines(found))),))
    console = Console(file=io.StringIO(), width=80)
    doctor.render(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\n".join(line.rstrip() for line in text.splitlines()) == PAGE


PAGE = """\
torch and the cards
  problem  Tesla V100-SXM2-32GB,   no kernels
           sm_70                   torch 2.13.0+cu130 has sm_75 sm_80 sm_86
                                   sm_90 sm_100 sm_120 compute_120;
                                   requirements/volta.txt has them: `make clean
                                   setup CONSTRAINTS=requirements/volta.txt`
  ok       torch sees              1 CUDA device
  ok       set that fits           requirements/volta.txt
                                   torch 2.10.0 (CUDA 12.8) has kernels for
                                   Tesla V100-SXM2-32GB, sm_70

1 problem, 0 to know about:
  Tesla V100-SXM2-32GB, sm_70: torch 2.13.0+cu130 has sm_75 sm_80 sm_86 sm_90
sm_100 sm_120 compute_120; requirements/volta.txt has them: `make clean setup
CONSTRAINTS=requirements/volta.txt`"""


def test_a_v100_with_the_volta_set_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake.machine(tmp_path, fake.V100, smi=fake.says(V100_LINE))
    _torch(monkeypatch, "2.10.0+cu128", "12.8", FLAGS_210, 1)
    assert {line.mark for line in wheel.lines(found)} == {"ok"}


def test_a_cpu_build_beside_a_card_names_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake.machine(tmp_path, fake.H200, smi=fake.says(H200_LINE))
    _torch(monkeypatch, "2.13.0+cpu", None, "", 0)
    line = _line(wheel.lines(found), "NVIDIA H200, sm_90")
    assert line.mark == "problem"
    assert line.reason.startswith("torch 2.13.0+cpu is a CPU build; requirements/default.txt")
    assert _line(wheel.lines(found), "torch sees").mark == "problem"


def test_a_v100_without_a_driver_is_told_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake.machine(tmp_path, fake.V100)
    _torch(monkeypatch, "2.10.0+cu128", "12.8", FLAGS_210, 0)
    line = wheel.lines(found)[0]
    assert line.mark == "problem"
    assert "install the 580 branch" in line.reason
    assert "install the 580 branch" in driver.lines(found, FakeNvml(init="Library Not Found"))[0].reason


def test_cards_that_a_container_hides_are_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake.machine(tmp_path, *[fake.H200] * 8, smi=fake.says(H200_LINE))
    _torch(monkeypatch, "2.13.0+cu130", "13.0", FLAGS_213, 1)
    assert [line.mark for line in wheel.lines(found)] == ["ok", "note", "ok", "note"]


def test_a_missing_torch_is_a_problem_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_torch(monkeypatch)
    report = doctor.examine(fake.machine(tmp_path, fake.V100))
    problems = {line.what for line in report.marked("problem")}
    assert {"torch", "Inductor", "Volta GV100 (10de:1db5), sm_70"} <= problems
    assert "broke" not in {line.value for section in report.sections for line in section.lines}


def test_an_old_display_card_beside_a_working_one_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = fake.says(H200_LINE.replace(":10:", ":11:"))
    found = fake.machine(tmp_path, fake.GT710, fake.H200, smi=smi)
    _torch(monkeypatch, "2.13.0+cu130", "13.0", FLAGS_213, 1)
    assert [line.mark for line in wheel.lines(found)[:2]] == ["note", "ok"]


@pytest.mark.parametrize(
    ("card", "how"),
    [((7, 0), ""), ((9, 0), "kernels"), ((8, 9), "kernels"), ((12, 1), "kernels"), ((13, 0), "PTX")],
)
def test_kernels_or_ptx_decide_whether_torch_serves_a_card(card: tuple[int, int], how: str) -> None:
    assert wheel.serves(tuple(FLAGS_213.split()), card) == how


@pytest.mark.parametrize(
    ("triton", "mark", "word"),
    [
        ("3.7.1", "note", "no tensor core"),
        ("3.6.0", "note", "no tensor core"),
        ("3.3.1", "problem", "does not compile"),
        ("3.2.0", "problem", "aborts the process"),
        ("3.1.0", "note", "m8n8k4"),
        (None, "problem", "needs it"),
    ],
)
def test_each_triton_has_its_finding_on_volta(triton: str | None, mark: str, word: str) -> None:
    line = compilers.triton_on((7, 0), triton)
    assert line.mark == mark
    assert word in line.reason


def test_triton_is_plainly_fine_from_ampere_on_and_refused_below_volta() -> None:
    assert compilers.triton_on((9, 0), "3.6.0").mark == "ok"
    assert compilers.triton_on((6, 0), "3.6.0").mark == "problem"


def test_equal_cards_share_a_line_and_have_their_topology(tmp_path: Path) -> None:
    nvml = FakeNvml(*v100s(4))
    lines = driver.lines(fake.machine(tmp_path), nvml)
    assert [line.what for line in lines[:5]] == [
        "driver",
        "GPU 0-3",
        "GPU 0-3 power limit",
        "GPU 0-3 PCIe",
        "GPU 0-3 NVLink",
    ]
    assert _line(lines, "driver").value == "580.65.06, serves CUDA up to 13.0"
    assert _line(lines, "GPU 0-3 NVLink").value == "4 of 4 links up"
    assert _line(lines, "GPU 0-3 PCIe").value == "gen 1 x16 (of gen 3 x16)"
    assert _line(lines, "GPU 0 to GPU 0-3").value.split() == ["X", "NV2", "SYS", "NV2"]
    assert _line(lines, "topology").mark == "note"
    assert nvml.closed


def test_a_switch_connects_every_pair(tmp_path: Path) -> None:
    cards = [
        FakeCard(bus_id=f"00000000:{i:02}:00.0", links=dict.fromkeys(range(6), "switch")) for i in (16, 17)
    ]
    lines = driver.lines(fake.machine(tmp_path), FakeNvml(*cards))
    assert _line(lines, "GPU 1 to GPU 0-1").value.split() == ["NV6", "X"]


def test_whatever_slows_a_card_is_noted_with_its_remedy(tmp_path: Path) -> None:
    slow = FakeCard(limit_w=163, width=4, links={0: "0000:11:00.0", 1: ""}, pids=(42,))
    lines = driver.lines(fake.machine(tmp_path), FakeNvml(FakeCard(), slow, FakeCard(links={0: ""})))
    assert _line(lines, "GPU 0,2 power limit").mark == "ok"
    assert "nvidia-smi -pl 300" in _line(lines, "GPU 1 power limit").reason
    assert _line(lines, "GPU 1 processes").value == "1 (pid 42)"
    assert _line(lines, "GPU 1 PCIe").mark == "note"
    assert _line(lines, "GPU 1 NVLink").reason.startswith("down: 1.")
    assert _line(lines, "GPU 2 NVLink").reason == "the cards reach each other over PCIe only"


def test_a_cgroup_limit_is_read_in_both_versions(tmp_path: Path) -> None:
    two, one = tmp_path / "v2", tmp_path / "v1"
    (two).mkdir()
    (two / "memory.max").write_text(f"{4 << 30}\n")
    (two / "memory.current").write_text(f"{1 << 30}\n")
    (two / "cpu.max").write_text("50000 100000\n")
    (one / "memory").mkdir(parents=True)
    (one / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.memory_limit_bytes(two) == (4 << 30, 1 << 30)
    assert host.memory_limit_bytes(one) == (None, None)
    lines = host.lines(two)
    assert _line(lines, "cores").value == "0.5"
    assert _line(lines, "memory").value.endswith("of 4.0 GiB")


def test_a_cudnn_that_dropped_volta_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, "2.13.0+cu126", "12.6", FLAGS_210, 1)
    torch, _ = installed.torch_or_reason()
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92000))  # type: ignore[union-attr]
    torch.cuda = SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 5)))  # type: ignore[union-attr]
    lines = versions.lines(fake.machine(tmp_path, fake.V100))
    line = _line(lines, "cuDNN")
    assert (line.value, line.mark) == ("9.20.0", "problem")
    assert "pytorch#162574" in line.reason


def test_a_v100s_kernels_and_decisions_can_be_read_on_any_machine(tmp_path: Path) -> None:
    found = fake.machine(tmp_path, fake.V100, fake.GT710, smi=fake.says(V100_LINE))
    half = _line(kernels.lines(found), "sm_70 float16")
    assert half.value.startswith("efficient")
    assert "not flash: FlashAttention needs sm_80" in half.reason
    bfloat = _line(kernels.lines(found), "sm_70 bfloat16")
    assert (bfloat.value, bfloat.mark) == ("math only (any head size)", "note")
    assert _line(kernels.lines(found), "sm_70 grouped queries").value == "heads are expanded"
    assert _line(decisions.lines(found), "sm_70 cudagraphs").value == "off"
    assert _line(decisions.lines(found), "sm_70 bf16").value == "refused"


def test_head_sizes_that_a_kernel_refuses_stand_apart(tmp_path: Path) -> None:
    found = fake.machine(tmp_path, fake.H200, smi=fake.says(H200_LINE))
    values = [line.value for line in kernels.lines(found) if line.what == "sm_90 bfloat16"]
    assert len(values) == 2
    assert "cudnn" in values[0]
    assert "head size 64, 80, 96, 128" in values[0]
    assert "cudnn" not in values[1]


def test_without_a_card_the_cpu_is_answered_for(tmp_path: Path) -> None:
    found = fake.machine(tmp_path)
    assert kernels.devices(found) == [("cpu", (0, 0))]
    assert all(line.what.startswith("CPU ") for line in kernels.lines(found))
