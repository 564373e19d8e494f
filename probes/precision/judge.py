"""The verdict on what a cell found, and its one-line reason. Pure: no model is run here."""

from __future__ import annotations

from harness.rows import Verdict
from probes.precision.found import Found, headroom

# Powers of two between the largest value and the dtype's maximum below which a verdict is a caveat: another text,
# or an update, easily doubles a maximum.
ENOUGH = 2.0


def judge(found: Found) -> tuple[Verdict, str]:
    """`nonfinite`: what was asked cannot train. `caveat`: it does, close to the edge or with steps lost."""
    if bad := _not_finite(found):
        return "nonfinite", bad
    doubts = _doubts(found)
    reached = f"largest {_kept(found)}"
    return ("caveat", "; ".join([*doubts, reached])) if doubts else ("ok", reached)


def _not_finite(found: Found) -> str:
    if found.weights:
        return f"a weight is not finite in {found.dtype}: {found.weights}"
    if found.forward and (found.compiled_bad or not found.compiled):
        return f"forward: {found.forward}; {_reached(found)}"
    if found.compiled_bad:
        return f"compiled, and not in eager: {found.compiled_bad}; {_reached(found)}"
    if found.backward and found.finite_scale is None and not found.forward:
        return f"backward, at every loss scale down to 1: {found.backward}; {_reached(found)}"
    if found.after:
        return f"after {found.updates} updates: {found.after}"
    if found.updates and found.skipped == found.updates:
        return (
            f"GradScaler skipped all {found.updates} updates from scale {found.scale:,.0f}: {found.backward}"
        )
    return ""


def _doubts(found: Found) -> list[str]:
    words = []
    if found.forward:
        words.append(f"finite only as compiled, which skips roundings; eager's forward: {found.forward}")
    elif found.backward:
        scales = f"{found.scale:,.0f} (finite at {found.finite_scale or 0:,.0f})"
        words.append(f"gradients overflow at loss scale {scales}: {found.backward}")
    if found.skipped:
        words.append(f"GradScaler skipped {found.skipped} of {found.updates} updates")
    if headroom(found.narrow.value, found.limit) < ENOUGH:
        words.append(f"less than {ENOUGH:g} powers of two are left in {found.dtype}")
    if found.attention == "eager" and headroom(found.scores.unscaled.value, found.limit) < ENOUGH:
        words.append(_score(found))
    if found.fallback:
        words.append(f"compiled in part only: {found.fallback}")
    if found.zero_gradients and found.dtype != "float32":
        names = found.zero_gradients
        words.append(f"{len(names)} parameters have a gradient of zeros alone, the first {names[0]}")
    if found.dtype == "bfloat16" and not found.bf16.startswith("native"):
        words.append(f"bfloat16 on this device: {found.bf16}")
    return words


def _reached(found: Found) -> str:
    """What float32 reaches where the narrow dtype failed."""
    return f"in float32 {_kept(found)}, {_score(found)}"


def _kept(found: Found) -> str:
    left = headroom(found.narrow.value, found.limit)
    return (
        f"|activation| kept in {found.dtype} {found.narrow.value:,.4g} in {found.narrow.where}, "
        f"{left:.2f} powers of two below {found.limit:,.5g}"
    )


def _score(found: Found) -> str:
    unscaled, scaled = found.scores.unscaled, found.scores.scaled
    beyond = f" (beyond {found.limit:,.5g})" if unscaled.value > found.limit else ""
    return f"|QK^T| {unscaled.value:,.4g} unscaled{beyond}, {scaled.value:,.4g} scaled, in {unscaled.where}"
