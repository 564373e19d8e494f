"""TORCH_COMPILE_VOLTA.md and VERIFY.md, from claims, findings and rows. Pure but for reading the runs it is named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from harness.errors import HarnessError
from reports import lowering, matrix
from reports.bench import environment
from reports.claims import CATALOGUE, Check, Claims, Failure, Table
from reports.findings import Finding, Findings
from reports.load import Run, load_run
from reports.run_facts import facts

PAGES = (CATALOGUE, "VERIFY.md")
_ORDER = ("README.md", "BENCH.md", CATALOGUE)


def render(claims: Claims, found: Findings, root: Path) -> dict[str, str]:
    """Both pages by file name. `root` is the folder that the claims' runs are named from."""
    env = environment(escape=False)
    catalogue = {
        "failures": [_failure(one, found.results.get(one.id)) for one in claims.failure],
        "tables": [_table(one, root) for one in claims.table],
    }
    verify = {"pages": _by_page(claims, found), "counts": _counts(claims, found)}
    return {
        CATALOGUE: env.get_template("catalogue.md.jinja").render(**catalogue),
        "VERIFY.md": env.get_template("verify.md.jinja").render(**verify),
    }


def _failure(one: Failure, finding: Finding | None) -> dict[str, object]:
    return {"it": one, "shown": last(one, finding), "sources": ", ".join(one.sources)}


def _table(one: Table, root: Path) -> dict[str, object]:
    try:
        run = load_run(root / one.run)
    except HarnessError:
        return {"it": one, "text": "", "origin": ""}
    rows = sorted((row for row in run.rows if row.status != "skipped"), key=lambda row: row.started_at)
    if run.meta.get("probe") == "triton-lowering":
        text = lowering.pivot(rows, one.by, one.across) if one.by else lowering.table(rows)
    else:
        rows.sort(key=lambda row: [str(row.axes.get(a, "")) for a in ("model", "mode", "dtype")])
        text = matrix.markdown(rows)  # an emulation's label stands above its table
    return {"it": one, "text": text.rstrip(), "origin": _origin(run)}


def _origin(run: Run) -> str:
    wanted = ("when", "cells", "device", "libraries")
    return "; ".join(f"{what}: {text}" for what, text in facts(run) if what in wanted)


def _by_page(claims: Claims, found: Findings) -> list[tuple[str, list[tuple[str, ...]]]]:
    pages: dict[str, list[tuple[str, ...]]] = {}
    for page, words, check in claims.checks():
        plain = words.replace("**", "")
        line = (plain, _checked_by(check), ", ".join(check.needs), last(check, found.results.get(check.id)))
        pages.setdefault(page, []).append(line)
    return sorted(
        pages.items(), key=lambda item: (_ORDER.index(item[0]) if item[0] in _ORDER else 9, item[0])
    )


def _checked_by(check: Check) -> str:
    rows = f"rows of {check.run}" if check.run else ""
    if check.where and check.run:
        rows += " where " + ", ".join(f"{axis} = {_values(value)}" for axis, value in check.where.items())
    return "; else ".join(filter(None, [check.command, rows])) or "–"


def _values(value: object) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def last(check: Check, finding: Finding | None) -> str:
    """The last result in words: date, device, versions; or why there is none."""
    if finding is None:
        if not (check.command or check.run):
            return "rests on its sources: nothing here can check it"
        return f"never checked: needs {', '.join(check.needs)}" if check.needs else "never checked"
    word = "holds" if finding.holds else "FAILS"
    where = ", ".join(filter(None, [finding.at, finding.device, finding.versions]))
    by = "" if finding.how == "command" else " (rows)"
    return f"{word}{by}: {finding.detail}; {where}"


def _counts(claims: Claims, found: Findings) -> str:
    words: Counter[str] = Counter()
    for _, _, check in claims.checks():
        finding = found.results.get(check.id)
        if finding is None:
            word = "not checked yet" if check.command or check.run else "on their sources alone"
        else:
            word = "hold" if finding.holds else "FAIL"
        words[word] += 1
    return f"{sum(words.values())} claims: " + ", ".join(f"{n} {word}" for word, n in words.most_common())
