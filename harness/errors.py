"""The error a user can mend, and the words that help to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarnessError(Exception):
    """Wrong input. Entry points print its message without a traceback and exit with 2."""


def unknown(what: str, found: object, allowed: Iterable[object], place: str) -> HarnessError:
    """The error for a word that is not in a closed list.

    `place` is file and path inside it, e.g. "suites/x.toml: axes.compile[2]".
    """
    words = [str(word) for word in allowed]
    near = difflib.get_close_matches(str(found), words, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return HarnessError(
        f"{place}: unknown {what} {found!r}.{hint}\n  allowed: {', '.join(words) or '(none)'}"
    )
