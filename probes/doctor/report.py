"""What an examination finds: lines in sections, and how they are counted."""

from __future__ import annotations

from typing import Literal

import msgspec

Mark = Literal["ok", "note", "problem"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `reason` says why, or what to do; a problem has one always."""

    what: str
    value: str
    mark: Mark = "ok"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.mark == "problem" and not self.reason:
            raise ValueError(f"{self.what}: a problem without a reason")


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one module of this package."""

    title: str
    lines: tuple[Line, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All sections, in reading order."""

    sections: tuple[Section, ...]

    def marked(self, mark: Mark) -> list[Line]:
        """The lines with this mark."""
        return [line for section in self.sections for line in section.lines if line.mark == mark]
