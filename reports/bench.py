"""BENCH.md, or one HTML file, with its plots: a run's rows made readable."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jinja2

from harness.errors import HarnessError
from reports import text
from reports.load import Run
from reports.page import Page, Picture, page

Format = Literal["md", "html"]


def render(runs: Sequence[Run], out_folder: Path | str, fmt: Format = "md") -> list[Path]:
    """Write the report of these runs and return the files written, the page first.

    md: BENCH.md and plots/*.png beside it. html: BENCH.html alone, plots inside.
    The same runs give the same page, byte for byte. Raises HarnessError where nothing can be written.
    """
    if not runs:
        raise HarnessError("no run to report; give the folder of one")
    made, folder = page(runs), Path(out_folder)
    pictures = {picture.path: _draw(picture) for picture in _pictures(made)}
    files: dict[str, bytes] = {}
    if fmt == "html":
        files["BENCH.html"] = html(made, pictures).encode("utf-8", "backslashreplace")
    else:
        files["BENCH.md"] = markdown(made).encode("utf-8", "backslashreplace")
        files |= pictures
    return [write(folder / name, data) for name, data in files.items()]


def markdown(made: Page) -> str:
    """The page as GitHub's Markdown."""
    return environment(escape=False).get_template("bench.md.jinja").render(page=made)


def html(made: Page, pictures: dict[str, bytes]) -> str:
    """The page as one HTML file that needs no other."""
    inline = {path: base64.b64encode(data).decode("ascii") for path, data in pictures.items()}
    return environment(escape=True).get_template("bench.html.jinja").render(page=made, inline=inline)


def environment(escape: bool) -> jinja2.Environment:
    """Our templates and filters; `escape` for HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"md": text.markdown, "fence": text.fence, "line": text.one_line}
    return environment


def _pictures(made: Page) -> list[Picture]:
    return [picture for section in made.sections for picture in section.pictures]


def _draw(picture: Picture) -> bytes:
    from reports import plots  # Matplotlib takes most of a second; a page without plots does without

    return plots.draw(picture.group, picture.kind)


def write(path: Path, data: bytes) -> Path:
    """Write whole or not at all. Raises HarnessError where it cannot."""
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be written: {error.strerror}") from error
    return path
