"""The page as a whole: golden texts, and what must be on it whatever the run was."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from harness.errors import HarnessError
from harness.rows import Memory, Row
from reports.bench import html, markdown, render
from reports.load import load_run
from reports.page import page
from tests.conftest import ROOT
from tests.test_reports_sample import ENVIRONMENT, GIB, failed, row, run, story, sweep, write
from tests.test_reports_text import assert_tables_whole

GOLDEN = ROOT / "tests" / "golden"


def cpu(one: Row) -> Row:
    """The row as a CPU would leave it: no allocator, no kernel seen."""
    changes = {"device": "cpu", "memory": Memory(host_peak_bytes=3 * GIB), "attention": None}
    return msgspec.structs.replace(one, **changes)


DIAGNOSTIC = tuple(
    Row(suite="drill", probe="drill", cell=fault, device="cpu", axes={"fault": fault}, **more)  # type: ignore[arg-type]
    for fault, more in {
        "none": {},
        "nan": {"nulls": {"loss[1]": "NaN"}},
        "parity": {"verdict": "mismatch", "verdict_reason": "dq is off | by 2", "expected": False},
        "segv": {"status": "crashed", "reason": "SIGSEGV before a result"},
    }.items()
)
RUNS = {
    "sweep": [run(*sweep(("math", "xformers", "flash"), ("none", "model")))],
    "everything": [run(*story())],
    "cpu": [run(*(cpu(one) for one in sweep(("math", "flash"), ("none",))), device="cpu")],
    "verdicts": [run(*DIAGNOSTIC, suite="drill", title="fault drill", suite_toml="")],
    "two-runs": [
        run(*sweep(("math", "flash"), ("none",))),
        run(*sweep(("math", "flash"), ("none",)), started_at="2026-03-04T05:06:07+00:00"),
    ],
    "skipped": [run(*(failed("skipped", "no CUDA device here", True, seq=s) for s in (1024, 2048)))],
    "empty": [run()],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_the_golden_text(name: str) -> None:
    """UPDATE_GOLDEN=1 writes it anew; read the difference before committing it."""
    path, made = GOLDEN / f"bench-{name}.md", markdown(page(RUNS[name]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    assert made == path.read_text()
    assert_tables_whole(made)


def test_old_rows_render_the_same_from_any_folder(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, RUNS["everything"][0]) for name in ("a", "elsewhere")]
    pages = [render([load_run(folder)], tmp_path / f"out-{folder.name}") for folder in folders]
    first, second = ([path.read_bytes() for path in files] for files in pages)
    assert first == second
    assert [path.name for path in pages[0]] == ["BENCH.md", "speed-1.png", "memory-1.png"]


def test_the_order_of_row_files_does_not_matter() -> None:
    rows = sweep(("math", "flash"), ("none", "model"))
    assert markdown(page([run(*rows)])) == markdown(page([run(*reversed(rows))]))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    (path,) = render(RUNS["everything"], tmp_path, "html")
    text = path.read_text()
    parser = _Tags()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert "&lt;LoweringException&gt;" in text
    assert "<b> | c" not in text


def test_html_says_what_markdown_says() -> None:
    made = page(RUNS["everything"])
    text = html(made, {picture.path: b"" for section in made.sections for picture in section.pictures})
    for section in made.sections:
        for cells in section.table.rows if section.table else ():
            assert all(cell.replace("<", "&lt;").replace(">", "&gt;") in text for cell in cells)


def test_a_value_that_was_nan_is_shown_as_such() -> None:
    nan = row(step_s=(None,) * 6, first_step_s=None, nulls={"step_s[0]": "NaN", "first_step_s": "infinity"})
    text = markdown(page([run(nan, row(seq=2048))]))
    assert "n/a (NaN)" in text
    assert "n/a (infinity)" in text


@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_few_samples_keep_the_table_whole_and_say_so(samples: int) -> None:
    text = markdown(page([run(row(step_s=(0.3,) * samples), row(seq=2048))]))
    assert_tables_whole(text)
    assert ("no samples" if not samples else f"only {samples} timed step") in text
    assert " nan" not in text


def test_dirty_code_damaged_rows_mixed_environments_and_interruption_are_said_first() -> None:
    other = {**ENVIRONMENT, "code": {**ENVIRONMENT["code"], "dirty": True}}
    mixed = run(
        row(),
        row(seq=2048, environment="e2"),
        environments={"e1": ENVIRONMENT, "e2": other},
        interrupted=True,
    )
    text = markdown(page([msgspec.structs.replace(mixed, damaged=(("x.json", "not JSON"),))]))
    for said in (
        "uncommitted changes",
        "x.json is no row",
        "2 environments that differ in code",
        "was interrupted",
    ):
        assert said in text


def test_mfu_is_shown_where_the_peak_is_known_and_explained_where_not() -> None:
    known = row(flops_per_step=3e12, peak_flops_per_s=112e12)
    assert "| MFU |" in markdown(page([run(known, row(seq=2048))]))
    text = markdown(page([run(row(flops_per_step=3e12), row(seq=2048))]))
    assert "| MFU |" not in text
    assert "MFU: n/a, the peak FLOP/s of Tesla V100-SXM2-32GB" in text


def test_a_page_that_cannot_be_written_is_a_plain_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot be written"):
        render(RUNS["empty"], tmp_path / "file")
    with pytest.raises(HarnessError, match="no run to report"):
        render([], tmp_path)
