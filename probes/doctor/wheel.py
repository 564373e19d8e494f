"""Does the torch that is installed have kernels for the cards that are here, and which would?"""

from __future__ import annotations

import re

from harness.hardware import Capability, Card, Inventory
from harness.wheels import DEFAULT, SETS, WheelSet, choose, driver_problem, has_kernels, hidden
from probes.doctor import installed
from probes.doctor.report import Line, Mark

TITLE = "torch and the cards"


def lines(found: Inventory) -> list[Line]:
    """One line per card, then what torch itself sees, then the set that fits."""
    rows = dict.fromkeys(_for_card(card, found) for card in found.cards)  # equal cards share a line
    return [*rows, _torch_sees(found), _set(found)]


def arch_flags() -> tuple[str, ...]:
    """`("sm_70", …, "compute_90")`; empty for a CPU build. Needs no device."""
    torch, _ = installed.torch_or_reason()
    flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", None)
    return tuple((flags() or "").split()) if flags is not None else ()


def serves(flags: tuple[str, ...], card: Capability) -> str:
    """`kernels`, `PTX` (compiled by the driver on first use), or "" if this torch cannot run on it."""
    if has_kernels(tuple(_capabilities(flags, "sm")), card):
        return "kernels"
    return "PTX" if any(ptx <= card for ptx in _capabilities(flags, "compute")) else ""


def _capabilities(flags: tuple[str, ...], kind: str) -> list[Capability]:
    found = [re.fullmatch(rf"{kind}_(\d+)(\d)[a-z]?", flag) for flag in flags]
    return [(int(one[1]), int(one[2])) for one in found if one is not None]


def _for_card(card: Card, found: Inventory) -> Line:
    what = f"{card.name}, {card.sm}"
    torch, reason = installed.torch_or_reason()
    remedy = _remedy(found)
    if torch is None:
        return Line(what=what, value="no torch", mark="problem", reason=f"{reason}; {remedy}")
    if not torch.version.cuda:
        why = f"torch {torch.__version__} is a CPU build; {remedy}"
        return Line(what=what, value="not usable", mark="problem", reason=why)
    if card.capability is None:
        return Line(what=what, value="unknown", mark="note", reason=card.unknown.get("capability", ""))
    how = serves(arch_flags(), card.capability)
    if not how:
        why = f"torch {torch.__version__} has {' '.join(arch_flags())}; {remedy}"
        return Line(what=what, value="no kernels", mark=_severity(card, found), reason=why)
    if card.driver is None:
        mark: Mark = "note" if hidden(card, found) else "problem"
        return Line(what=what, value=how, mark=mark, reason=driver_problem(card, found, _chosen(found)))
    slow = "no kernels of its own: the driver compiles PTX on first use" if how == "PTX" else ""
    return Line(what=what, value=how, mark="note" if slow else "ok", reason=slow)


def _severity(card: Card, found: Inventory) -> Mark:
    """A display card beside cards that compute is worth a note, no more."""
    flags = arch_flags()
    computing = [c for c in found.cards if c.capability and c.driver and serves(flags, c.capability)]
    older = all((card.capability or (0, 0)) < (c.capability or (0, 0)) for c in computing)
    return "note" if computing and older and (card.capability or (0, 0)) < (7, 0) else "problem"


def _chosen(found: Inventory) -> WheelSet:
    name = choose(found).constraints_file
    return next(one for one in SETS if one.constraints_file == name)


def _remedy(found: Inventory) -> str:
    choice = choose(found)
    if not any(card.capability for card in found.cards):
        return "run `make setup`"
    if choice.reason.endswith("CPU"):
        return "; ".join(choice.warnings)
    return f"{choice.constraints_file} has them: `make clean setup CONSTRAINTS={choice.constraints_file}`"


def _torch_sees(found: Inventory) -> Line:
    count, words = installed.cuda_state()
    served = [card for card in found.cards if card.driver]
    value = f"{count} CUDA device{'s' * (count != 1)}"
    if count < len(served):
        why = words or "CUDA_VISIBLE_DEVICES or a container hides the rest, or this torch is a CPU build"
        mark: Mark = "problem" if count == 0 else "note"
        return Line(what="torch sees", value=f"{value} of {len(served)}", mark=mark, reason=why)
    if count == 0:
        return Line(what="torch sees", value="no CUDA device", reason="cells run on the CPU")
    return Line(what="torch sees", value=value, mark="note" if words else "ok", reason=words)


def _set(found: Inventory) -> Line:
    choice = choose(found)
    worse = choice.constraints_file != DEFAULT.constraints_file or choice.warnings
    reason = "; ".join((choice.reason, *choice.warnings))
    mark: Mark = "note" if worse and choice.warnings else "ok"
    return Line(what="set that fits", value=choice.constraints_file, mark=mark, reason=reason)
