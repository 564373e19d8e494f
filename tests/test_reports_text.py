"""Numbers as a reader wants them; strings that cannot break a page."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reports import text
from reports.bench import markdown
from reports.page import page
from tests.test_reports_sample import failed, row, run

NASTY = "first | line\nsecond `line` <b>bold</b> \\| back\\slash \x1b[31m*red*\u2028 end"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (999.6, "1,000"),
        (43802.4, "43,802"),
    ],
)
def test_a_number_has_three_significant_digits_and_no_exponent(value: float, shown: str) -> None:
    assert text.significant(value) == shown


def test_sizes_shares_and_ratios_read_well() -> None:
    assert [text.gib(n * 2**30) for n in (24, 0.5, 0.0123, 384)] == ["24.00", "0.50", "0.012", "384.0"]
    assert [text.percent(s) for s in (0.012, 0.5, 0)] == ["1.2 %", "50 %", "0.0 %"]
    assert text.ratio(1.168) == "1.17x"


def test_equal_footnotes_share_a_number() -> None:
    notes = text.Notes()
    assert [notes.mark(t) for t in ("a", "b", "a")] == ["¹", "²", "¹"]
    assert notes.lines() == ("¹ a", "² b")
    assert text.superscript(120) == "¹²⁰"


def test_a_nasty_string_becomes_one_harmless_line() -> None:
    shown = text.markdown(NASTY)
    assert shown == (
        r"first \| line ↵ second \`line\` &lt;b&gt;bold&lt;/b&gt; &#92;\| back&#92;slash \*red\* ↵ end"
    )


def test_underscores_inside_words_are_left_readable() -> None:
    assert text.markdown("max_autotune _x_") == r"max_autotune \_x\_"


def test_a_fence_is_longer_than_any_in_the_log() -> None:
    assert text.fence(("```", "a ````` b")) == "``````"


def unescaped_pipes(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line))


def assert_tables_whole(rendered: str) -> None:
    """Each line of a table has as many cells as its head, and no table is torn by a stray line."""
    in_fence, width = False, 0
    for line in rendered.split("\n"):
        if line.startswith("```"):
            in_fence = not in_fence
        if in_fence or not line.startswith("|"):
            width = 0
            continue
        width = width or unescaped_pipes(line)
        assert unescaped_pipes(line) == width, line


@given(st.text(min_size=1, max_size=60))
@example(NASTY)
@example("~~gone~~ $x$ ![i](u) <!-- c --> &lt; &#124; \\| |")
@example("a_b_c __x__ *y*")
def test_a_reader_of_markdown_sees_the_string_as_it_was(reason: str) -> None:
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = parser.parse(f"| a | b |\n|:--|:--|\n| {text.markdown(reason)} | end |\n")
    cells = [token for token in tokens if token.type == "inline"][2:]
    assert len(cells) == 2
    assert {child.type for child in cells[0].children or ()} <= {"text", "text_special"}
    assert "".join(child.content for child in cells[0].children or ()) == text.one_line(reason).strip()


@given(st.text(min_size=1, max_size=60))
@example(NASTY)
@example("\\")
@example("|")
@example("a\\|b\\\\|c")
@example("\x85\x0b\x0c\x1c\u2029")
def test_no_reason_whatever_breaks_a_table(reason: str) -> None:
    rows = (
        row(attention="flash", notes=(reason,), nulls={reason: reason}),
        failed("error", reason, seq=2048, log_tail=(reason,)),
        failed("skipped", reason, seq=4096),
        row(seq=8192, more={"odd": reason}),
    )
    rendered = markdown(page([run(*rows, title=reason, notes=[reason])]))
    assert_tables_whole(rendered)
    assert len(rendered.splitlines()) == len(rendered.split("\n")) - 1
    rendered.encode()
