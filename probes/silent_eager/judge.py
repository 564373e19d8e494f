"""The verdict on one compiled module: what ran, from the profile, and the causes that were heard. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from harness.rows import Verdict
from probes.dynamo_watch import Cause
from probes.silent_eager.ran import Ran

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one module that was to be compiled."""

    ran: Ran
    causes: tuple[Cause, ...] = ()  # each of them means that something ran eagerly
    breaks: tuple[Cause, ...] = ()  # what stands between two graphs may be no operator at all
    skipfiles: tuple[Cause, ...] = ()  # mostly torch's own frames: they matter where operators ran eagerly
    cudagraphs: bool = False  # whether they were asked for
    cudagraph_skips: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # what tc_volta's policy turned off, and said so


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, its one-line reason, and the causes that it rests on."""

    verdict: Verdict
    reason: str
    causes: tuple[Cause, ...] = ()


def judge(seen: Evidence) -> Judged:
    """`ok`: everything asked for ran compiled. `caveat`: it did, in pieces, or less was tried and it was said.

    `mismatch`: something ran eagerly, or without the CUDA graphs that were asked for.
    """
    causes = (*seen.causes, *_cudagraphs(seen))
    if not seen.ran.asked:
        return Judged(verdict="mismatch", reason="what was compiled was not called in a step", causes=causes)
    if seen.ran.eager or not seen.ran.compiled:
        causes = (*causes, *seen.breaks) or seen.skipfiles
    if not seen.ran.compiled:
        what = f"nothing ran compiled: {seen.ran.asked} calls{_operators(seen.ran)}"
        return Judged(verdict="mismatch", reason=_told(what, causes), causes=causes)
    if seen.ran.eager:
        what = f"beside {seen.ran.compiled} compiled graphs{_operators(seen.ran)}"
        return Judged(verdict="mismatch", reason=_told(what, causes), causes=causes)
    if causes:
        what = "some of what was compiled fell back"
        return Judged(verdict="mismatch", reason=_told(what, causes), causes=causes)
    if seen.breaks or seen.refused:
        words = [f"{len(seen.breaks)} graph breaks, {seen.breaks[0]}"] if seen.breaks else []
        reason = f"all operators ran compiled; {'; '.join([*words, *seen.refused])}"
        return Judged(verdict="caveat", reason=reason, causes=seen.breaks)
    graphs = f" and {seen.ran.graph_launches} CUDA graph launches" if seen.cudagraphs else ""
    reason = (
        f"{seen.ran.asked} calls ran {seen.ran.compiled} compiled graphs{graphs}, and no operator beside them"
    )
    return Judged(verdict="ok", reason=reason)


def _cudagraphs(seen: Evidence) -> tuple[Cause, ...]:
    if not seen.cudagraphs:
        return ()
    if seen.cudagraph_skips:
        return tuple(_from_message(text) for text in seen.cudagraph_skips)
    if not seen.ran.graph_launches:
        return (Cause(kind="cudagraphs", why="asked for, and no graph was launched; no reason was logged"),)
    return ()


def _from_message(text: str) -> Cause:
    """Inductor's message; a line of the user's code follows it where Inductor knows one."""
    places = _PLACE.findall(text)
    return Cause(
        kind="cudagraphs", why=text.split(". Found from")[0], where=":".join(places[-1]) if places else ""
    )


def _operators(ran: Ran) -> str:
    if not ran.eager:
        return ""
    most = ", ".join(f"{name} {count}x" for name, count in list(ran.eager.items())[:5])
    return f", {sum(ran.eager.values())} operators ran eagerly: {most}"


def _told(what: str, causes: Sequence[Cause]) -> str:
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"{what}; {causes[0]}{more}" if causes else f"{what}; Dynamo gave no cause"
