"""Checking claims: commands run and judged, rows that stand for them, and the two pages made from it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from harness import verify as checker
from harness.errors import HarnessError
from harness.verify import checked, lacks, verify
from reports import catalogue, claims, findings
from reports.claims import CATALOGUE, Check, Claims
from reports.findings import Finding, Findings
from tests.claimed_run import write_run
from tests.conftest import ROOT
from tests.test_cli import harness

GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


COMMANDS = {
    "exit 0": ("python -m json.tool claims.json", True, "exit 0"),
    "exit 1": ("python -m json.tool claims.toml", False, "exit 1"),
    "a test that passes": ("python -m pytest -q test_x.py -k right", True, "1 passed"),
    "a test that fails": ("python -m pytest -q test_x.py -k wrong", False, "exit 1"),
    "tests that are all skipped": (
        "python -m pytest -q test_x.py -k absent",
        False,
        "no test ran: 1 skipped",
    ),
    "past the deadline": (
        "python -m timeit -n 1 -r 1 'import time; time.sleep(60)'",
        False,
        "not done after 2 s",
    ),
}


@pytest.mark.parametrize(("command", "holds", "detail"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_is_run_as_written_and_judged(
    tmp_path: Path, command: str, holds: bool, detail: str
) -> None:
    (tmp_path / "claims.json").write_text("{}")
    (tmp_path / "claims.toml").write_text("[")
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 0\n"
        "@pytest.mark.skip(reason='x')\ndef test_absent(): pass\n"
    )
    finding, why = checked(
        Check(id="a", command=command, timeout_s=2 if "timeit" in command else 60), tmp_path
    )
    assert finding is not None, why
    assert (finding.holds, detail in finding.detail) == (holds, True), finding.detail


def test_a_command_that_runs_cells_is_judged_by_their_rows() -> None:
    command = "python -m harness.probe fault-drill fault=raise,none"
    right = Check(id="a", command=command, outcome=("ok", "error"))
    finding, _ = checked(right, ROOT)
    assert finding is not None
    assert (finding.holds, finding.how, finding.detail[:8]) == (True, "command", "2 cells:")
    finding, _ = checked(msgspec.structs.replace(right, outcome=("ok",)), ROOT)
    assert finding is not None
    assert not finding.holds
    assert "the drill raised this" in finding.detail


def test_what_this_machine_lacks_is_said_and_rows_stand_for_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker.devices, "here", lambda: "cpu")
    check = Check(id="a", command="python -m harness.probe x", needs=("cuda",))
    assert checked(check, tmp_path) == (None, "needs a CUDA GPU")
    assert lacks("triton 0.0.1") == "needs Triton 0.0.1 in .triton/0.0.1"
    with_rows = msgspec.structs.replace(
        check, run="results/run", where={"triton": "3.3.1"}, outcome=("error",)
    )
    finding, _ = checked(with_rows, tmp_path)
    assert finding is not None
    assert (finding.holds, finding.how, finding.at) == (True, "rows", "2026-12-01")
    assert checked(Check(id="b"), tmp_path) == (None, "rests on its sources")


SMALL = """
schema = 1
[[table]]
title = "One kernel"
run = "results/run"
command = "python -m harness.probe triton-lowering kernel=dot"
says = "Nothing was run."
[[table]]
title = "Pivoted"
run = "results/run"
command = "python -m harness.probe triton-lowering kernel=dot"
by = ["triton"]
across = ["kernel", "dtype"]
[[table]]
title = "Not there"
run = "results/none"
command = "python -m harness.probe none"
[[failure]]
id = "no-dot"
title = "No dot | compiles"
affects = "sm_70"
symptom = "an error"
cause = "a conversion is missing"
mitigation = "upgrade"
sources = ["triton#6698"]
command = "python -m json.tool no-such-file"
needs = ["triton 0.0.1"]
run = "results/run"
where = { triton = "3.3.1", kernel = ["dot"] }
outcome = ["error"]
[[failure]]
id = "reported"
title = "Reported only"
affects = "sm_70"
symptom = "zeros"
cause = "not known"
mitigation = "none"
sources = ["a public report"]
[[claim]]
id = "json"
page = "README.md"
says = "it is JSON"
command = "python -m json.tool results/run/run.json"
[[claim]]
id = "fast"
page = "README.md"
says = "1,000 tok/s"
run = "results/run"
where = { kernel = "timed" }
value = "tokens_per_s"
equals = 1500
[[claim]]
id = "elsewhere"
page = "README.md"
says = "on a V100"
command = "python -m json.tool x"
needs = ["v100"]
"""


def test_verify_checks_what_it_can_says_the_rest_and_renders_both_pages(run: Path, tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(SMALL)
    console = Console(file=io.StringIO(), width=200)
    assert verify([], console, root=tmp_path) == 1
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "holds: json: exit 0" in said
    assert "holds: no-dot: 1 cell: error (rows of results/run)" in said
    assert "FAILS: fast: tokens_per_s 1,000, claimed 1,500" in said
    assert "cannot be checked here: elsewhere: needs a V100" in said
    kept = findings.read(tmp_path / findings.FILE)
    assert set(kept.results) == {"json", "no-dot", "fast"}
    assert verify(["no-dot"], console, root=tmp_path) == 0
    assert set(findings.read(tmp_path / findings.FILE).results) == {"json", "no-dot", "fast"}
    for name in catalogue.PAGES:
        assert (tmp_path / name).is_file()
    with pytest.raises(HarnessError, match="unknown claim 'jsn'. Did you mean 'json'?"):
        verify(["jsn"], console, root=tmp_path)


def test_both_pages_have_their_golden_text(run: Path, tmp_path: Path) -> None:
    """UPDATE_GOLDEN=1 writes them anew; read the difference before committing it."""
    (tmp_path / "claims.toml").write_text(SMALL)
    held = claims.read(tmp_path / "claims.toml")
    common = {"at": "2026-12-01", "device": "a CPU", "versions": "torch 2.13.0"}
    results = {
        "json": Finding(holds=True, how="command", detail="exit 0", **common),
        "no-dot": Finding(holds=True, how="rows", detail="1 cell: error", **common),
        "fast": Finding(holds=False, how="rows", detail="tokens_per_s 1,000, claimed 1,500", **common),
    }
    made = catalogue.render(held, Findings(results=results), tmp_path)
    for name, golden in ((CATALOGUE, "catalogue.md"), ("VERIFY.md", "verify.md")):
        if os.environ.get("UPDATE_GOLDEN"):
            (GOLDEN / golden).write_text(made[name])
        assert made[name] == (GOLDEN / golden).read_text(), golden


def test_an_emulation_in_the_catalogue_is_labelled(run: Path, tmp_path: Path) -> None:
    from reports.matrix import EMULATION

    meta = msgspec.json.decode((run / "run.json").read_bytes())
    (run / "run.json").write_bytes(msgspec.json.encode({**meta, "probe": "volta-lowering"}))
    for path in (run / "rows").iterdir():
        held = msgspec.json.decode(path.read_bytes())
        path.write_bytes(msgspec.json.encode({**held, "probe": "volta-lowering"}))
    one = claims.Table(title="t", run="results/run", command="python -m x")
    text = catalogue.render(Claims(schema=1, table=(one,)), Findings(), tmp_path)[CATALOGUE]
    assert EMULATION in text


def test_rendering_takes_all_claims() -> None:
    done = harness("verify", "--no-run", "--only", "readme-math")
    assert (done.returncode, "rendering takes all claims" in done.stderr) == (2, True)
