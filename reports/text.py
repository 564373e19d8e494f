"""Text: numbers as a reader wants them, and strings that cannot break the page they are put on."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LINE_ENDS = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+\s*")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BREAKING = re.compile(r"([|*`\[\]~$]|(?<![^\W_])_|_(?![^\W_]))")
_LONGEST = 300
NONE = "–"


class Notes:
    """Footnotes of one table: equal texts share a number, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The superscript number of this text."""
        number = self._numbers.setdefault(text, len(self._numbers) + 1)
        return superscript(number)

    def lines(self) -> tuple[str, ...]:
        """The texts, each with its number in front."""
        return tuple(f"{superscript(n)} {text}" for text, n in self._numbers.items())


def superscript(number: int) -> str:
    """12 -> ¹²."""
    return str(number).translate(_SUPERSCRIPTS)


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Printable text on one line: line ends become ↵, control characters go, the end is cut with …."""
    text = _LINE_ENDS.sub(" ↵ ", _ANSI.sub("", text).strip())
    text = "".join(" " if c == "\t" else c for c in text if c == "\t" or unicodedata.category(c)[0] != "C")
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def markdown(text: str) -> str:
    """`text` as GitHub's Markdown shows it literally, in a table cell too.

    A backslash becomes an entity: beside an escaped pipe, readers disagree on which escapes which.
    """
    text = one_line(text, 4 * _LONGEST).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _BREAKING.sub(r"\\\1", text.replace("\\", "&#92;"))


def fence(lines: tuple[str, ...]) -> str:
    """A fence longer than any run of backticks in the lines it is put around."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    return "`" * max(3, longest + 1)


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits, never in exponent form: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0:
        return "0"
    exponent = int(f"{value:e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def gib(size_bytes: float) -> str:
    """Bytes as GiB (2**30), without the unit."""
    value = size_bytes / 2**30
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else significant(value, 2)


def percent(share: float, sign: str = "") -> str:
    """0.012 -> 1.2 %; from ten on without a decimal."""
    return f"{share * 100:{sign}.{0 if abs(share) >= 0.0995 else 1}f} %"


def ratio(value: float) -> str:
    """1.17x."""
    return f"{value:.2f}x" if value < 99.5 else f"{value:.0f}x"


def fact(value: object) -> str:
    """An axis value or another plain value: 8192 -> 8,192; True -> yes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return one_line("none" if value is None else str(value), 80)


def count(n: int, one: str, many: str = "") -> str:
    """2, "process", "processes" -> 2 processes."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
