"""The one error of tc_volta that is not the caller's mistake."""

from __future__ import annotations


class Unsupported(ValueError):
    """What was asked is well formed, and this card, kernel or model cannot do it; the message says why."""
