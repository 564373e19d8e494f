"""Docs are checked: what exists is described, what is described exists."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from harness.cells import Measure
from harness.suite_file import ExpectRule, SkipRule, SuiteFile
from probes.table import table
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
SUITES = (ROOT / "suites" / "README.md").read_text()
PAGES = ("README.md", "CONTRIBUTING.md", "suites/README.md", "CHANGELOG.md", "LOG.md", "VERIFY.md")
RENDERED = ("TORCH_COMPILE_VOLTA.md",)


def test_every_suite_key_is_documented() -> None:
    keys = {f"`{name}`" for name in SuiteFile.__struct_fields__} - {
        "`measure`",
        "`skip`",
        "`include`",
        "`expect`",
    }
    keys |= {f"`measure.{name}`" for name in Measure.__struct_fields__}
    keys |= {"`[[skip]]`", "`[[include]]`", "`[[expect]]`"}
    keys |= {f"`{name}`" for rule in (SkipRule, ExpectRule) for name in rule.__struct_fields__}
    assert not {key for key in keys if key not in SUITES}


def test_every_suite_file_is_documented() -> None:
    assert not {p.name for p in (ROOT / "suites").glob("*.toml") if f"`{p.name}`" not in SUITES}


def test_every_probe_is_documented() -> None:
    pages = README + SUITES + (ROOT / "CHANGELOG.md").read_text()
    assert not {name for name in table() if f"`{name}`" not in pages}


def test_every_make_target_that_readme_names_exists_and_the_main_ones_are_named() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(), re.M))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", pages, re.M))
    assert named <= targets, named - targets
    assert {"sweep-single", "test", "quick", "doctor", "drill"} <= named


def test_every_option_of_run_is_named_in_readme() -> None:
    import typer

    from harness.__main__ import app

    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {name for p in run.params for name in p.opts if name.startswith("--") and name != "--help"}
    assert not {name for name in options - {"--report", "--device"} if name not in README}


@pytest.mark.parametrize("page", [*PAGES, *RENDERED])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\((?!http)([^)#]+)", path.read_text())
    assert not [t for t in targets if not (path.parent / t).exists()]


def test_the_repository_names_no_path_of_a_machine_and_no_registry_host() -> None:
    bad = re.compile(r"/home/\w|/root/|/work/|download\.pytorch\.org|pypi\.org/simple|files\.pythonhosted")
    for path in _text_files():
        assert not bad.search(path.read_text(errors="replace")), path


def _text_files() -> list[Path]:
    ends = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".jinja", ".json"}
    skipped = {".venv", ".git", "local", "node_modules", ".hypothesis"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.suffix in ends and not skipped & set(path.relative_to(ROOT).parts) and path != Path(__file__)
    ]


def test_row_fields_are_documented() -> None:
    from harness.rows import Row

    text = (ROOT / "results" / "ROW.md").read_text()
    assert not {f.name for f in msgspec.structs.fields(Row) if f"`{f.name}`" not in text}
