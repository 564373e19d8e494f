"""Claims, findings and the two pages made from them: quotes that exist, checks that can fail, pages that are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.errors import HarnessError
from reports import bench, catalogue, claims, findings
from reports.claims import Check
from reports.findings import in_rows
from reports.load import load_run
from reports.page import page
from tests.claimed_run import write_run
from tests.conftest import ROOT

HELD = claims.read(ROOT / claims.FILE)
AGAIN = "python -m harness verify --no-run"


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_every_quote_is_on_its_page() -> None:
    for one in HELD.claim:
        if (ROOT / one.page).is_file():
            assert _flat(one.says) in _flat((ROOT / one.page).read_text()), one.id


def test_every_promise_of_readme_has_a_claim() -> None:
    part = (ROOT / "README.md").read_text().partition("## Why a row can be believed")[2].partition("\n## ")[0]
    promises = re.findall(r"^- (\*\*.+?\*\*)", part, re.M | re.S)
    quoted = [_flat(one.says) for one in HELD.claim]
    assert len(promises) > 3
    assert not [promise for promise in promises if _flat(promise) not in quoted]


def test_commands_of_claims_name_tests_that_exist() -> None:
    for _, _, check in HELD.checks():
        if "pytest" not in check.command:
            continue
        files = [word for word in check.command.split() if word.startswith("tests/")]
        names = [n for file in files for n in re.findall(r"def (test_\w+)", (ROOT / file).read_text())]
        chosen = re.search(r"-k '?([^']+)'?$", check.command)
        for word in re.split(r" or ", chosen[1]) if chosen else []:
            assert any(word in name for name in names), (check.id, word)


def test_committed_pages_are_what_claims_rows_and_findings_give() -> None:
    found = findings.read(ROOT / findings.FILE)
    for name, text in catalogue.render(HELD, found, ROOT).items():
        assert (ROOT / name).read_text() == text, f"{name} is not current: {AGAIN}"
    assert not set(found.results) - {check.id for _, _, check in HELD.checks()}


def test_committed_bench_pages_are_what_their_rows_give() -> None:
    pages = sorted((ROOT / "results").glob("*/*/BENCH.md"))
    pages = [path for path in pages if "local" not in path.parts]
    assert pages
    for path in pages:
        assert path.read_text() == bench.markdown(page([load_run(path.parent)])), path


WRONG = {
    "another schema": ("schema = 2", "schema is 2; this program reads schema 1"),
    "an unknown key": (
        'schema = 1\n[[claim]]\nid = "a"\npage = "p"\nsays = "s"\nwords = 1',
        "unknown field `words`",
    ),
    "a need that is none": (
        'schema = 1\n[[claim]]\nid = "a"\npage = "p"\nsays = "s"\nneeds = ["gpu"]',
        "needs 'gpu'; allowed: cuda, v100",
    ),
    "a shell line": (
        'schema = 1\n[[claim]]\nid = "a"\npage = "p"\nsays = "s"\ncommand = "rm -r x"',
        "start it with 'python -m '",
    ),
    "rows that show nothing": (
        'schema = 1\n[[claim]]\nid = "a"\npage = "p"\nsays = "s"\nrun = "r"',
        "neither `outcome` nor `value`",
    ),
    "the same twice": (
        'schema = 1\n[[claim]]\nid = "a"\npage = "p"\nsays = "s"\n[[claim]]\nid = "a"\npage = "p"\nsays = "t"',
        "id 'a' is there twice",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_claims_file_that_is_wrong_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(HarnessError) as told:
        claims.read(tmp_path / "claims.toml")
    assert message in str(told.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


SHOWN = {
    "an outcome": ({"where": {"triton": "3.3.1"}, "outcome": ("error",), "reason": "Unsupported"}, True),
    "another outcome": ({"where": {"triton": "3.3.1"}, "outcome": ("crashed",)}, False),
    "another reason": ({"where": {"triton": "3.3.1"}, "outcome": ("error",), "reason": "PassManager"}, False),
    "one of two that differs": ({"where": {"kernel": "dot"}, "outcome": ("error",)}, False),
    "no such row": ({"where": {"kernel": "none"}, "outcome": ("ok",)}, False),
    "a figure": ({"where": {"kernel": "timed"}, "value": "tokens_per_s", "equals": 1001.0}, True),
    "a figure that is off": (
        {"where": {"kernel": "timed"}, "value": "tokens_per_s", "equals": 1010.0},
        False,
    ),
    "a figure of two cells": ({"where": {"dtype": "fp16"}, "value": "tokens_per_s", "equals": 1000.0}, False),
    "a figure that is not known": (
        {"where": {"kernel": "timed"}, "value": "peak_bytes", "equals": 1.0},
        False,
    ),
    "a count": ({"value": "right", "equals": 2.0, "within": 0.0}, True),
}


@pytest.mark.parametrize(("how", "holds"), SHOWN.values(), ids=SHOWN)
def test_rows_are_held_against_a_claim(run: Path, how: dict[str, object], holds: bool) -> None:
    finding = in_rows(Check(id="a", run=str(run), **how), run)  # type: ignore[arg-type]
    assert finding.holds is holds, finding.detail
    assert (finding.device, finding.versions.startswith("torch 2.13.0")) == ("a CPU", True)
