"""Which set of packages has kernels for this machine's cards. Standard library only.

`python3 -m harness.wheels` prints the constraint file on standard output, for make, and the reasons on
standard error. The rule: the set that has kernels for the oldest card, as long as one has; a card that no
set serves is named and left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from harness.hardware import Capability, Card, Inventory, inventory

VOLTA: Capability = (7, 0)
LAST_VOLTA_BRANCH = 580  # NVIDIA's newer driver branches drop Maxwell, Pascal and Volta


@dataclass(frozen=True, kw_only=True)
class WheelSet:
    """One constraint file: the torch that it pins, and what that torch was built for.

    Source: `torch._C._cuda_getArchFlags()` of the wheels; CUDA's release notes for the drivers.
    """

    constraints_file: str
    torch: str
    cuda: str
    kernels: tuple[Capability, ...]
    least_driver: int  # a branch below it cannot run the wheel
    own_driver: int  # the branch that its CUDA came with


DEFAULT = WheelSet(
    constraints_file="requirements/default.txt",
    torch="2.13.0",
    cuda="13.0",
    kernels=((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    least_driver=580,
    own_driver=580,
)
VOLTA_SET = WheelSet(
    constraints_file="requirements/volta.txt",
    torch="2.10.0",
    cuda="12.8",
    kernels=((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    least_driver=525,  # CUDA 12's minor-version compatibility
    own_driver=570,
)
SETS = (DEFAULT, VOLTA_SET)  # in order of preference

# Index variants that no set here installs, for cards that neither has kernels for.
LEGACY_VARIANT = "the CUDA 12.6 index variant (cu126) of torch 2.11 to 2.14"
_LEGACY_RANGE: tuple[Capability, Capability] = ((5, 0), (9, 0))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision. `warnings` are what a user has to do, or to know, before it works."""

    constraints_file: str
    reason: str
    warnings: tuple[str, ...] = ()


def has_kernels(kernels: tuple[Capability, ...], card: Capability) -> bool:
    """A binary kernel runs on its own capability and on higher minors of the same major."""
    return any(major == card[0] and minor <= card[1] for major, minor in kernels)


def choose(found: Inventory) -> Choice:
    """The set for these cards, with its reason."""
    if not found.cards:
        return Choice(constraints_file=DEFAULT.constraints_file, reason="no NVIDIA card: CPU")
    known = [card for card in found.cards if card.capability is not None]
    served = [card for card in known if _sets_for(card)]
    warnings = [_unserved(card) for card in known if card not in served]
    warnings += [_unknown(card) for card in found.cards if card.capability is None]
    if not served:
        none = (
            "no set has kernels for this machine's cards: CPU" if known else "the card is unknown: newest set"
        )
        return Choice(constraints_file=DEFAULT.constraints_file, reason=none, warnings=_once(warnings))
    wheel, reason = _for_oldest(served, found.driver)
    warnings += [text for card in served if (text := driver_problem(card, found, wheel))]
    return Choice(constraints_file=wheel.constraints_file, reason=reason, warnings=_once(warnings))


def _for_oldest(served: list[Card], driver: str | None) -> tuple[WheelSet, str]:
    oldest = min(served, key=lambda card: card.capability or (0, 0))
    candidates = _sets_for(oldest)
    wheel = candidates[0]
    reason = f"torch {wheel.torch} (CUDA {wheel.cuda}) has kernels for {oldest.name}, {oldest.sm}"
    if len({card.sm for card in served}) > 1:
        reason += f", the oldest of {', '.join(sorted({card.sm for card in served}, key=_sm_order))}"
    branch = driver_branch(driver)
    if branch is not None and branch < wheel.least_driver:
        able = next((other for other in candidates if branch >= other.least_driver), None)
        if able is not None:
            return able, (
                f"driver {driver} is too old for torch {wheel.torch} (CUDA {wheel.cuda} needs "
                f"{wheel.least_driver}); torch {able.torch} (CUDA {able.cuda}) runs with it on {oldest.sm}"
            )
    return wheel, reason


def _sm_order(sm: str) -> int:
    return int(sm.removeprefix("sm_"))


def _sets_for(card: Card) -> list[WheelSet]:
    return [one for one in SETS if card.capability and has_kernels(one.kernels, card.capability)]


def driver_branch(driver: str | None) -> int | None:
    """`580.65.06` -> 580."""
    head = (driver or "").split(".")[0]
    return int(head) if head.isdigit() else None


def driver_problem(card: Card, found: Inventory, wheel: WheelSet) -> str:
    """What is wrong between this card, its driver and the set, or ""."""
    if card.driver is None:
        return _no_driver(card, found, wheel)
    branch = driver_branch(card.driver)
    if branch is None:
        return ""
    if branch < wheel.least_driver:
        return (
            f"driver {card.driver} is too old for torch {wheel.torch}: CUDA {wheel.cuda} needs branch "
            f"{wheel.least_driver} or newer"
        )
    if branch < wheel.own_driver:
        return (
            f"driver {card.driver} is older than CUDA {wheel.cuda}'s own ({wheel.own_driver}): it runs by "
            "minor-version compatibility, without compilation of PTX in the driver"
        )
    return ""


def dropped(card: Card, found: Inventory) -> bool:
    """A Volta card under a driver of a branch that no longer serves it."""
    return card.capability == VOLTA and (driver_branch(found.driver) or 0) > LAST_VOLTA_BRANCH


def hidden(card: Card, found: Inventory) -> bool:
    """On the bus and not in the list of a driver that should serve it: a container shows all of the bus."""
    return card.driver is None and found.driver is not None and not dropped(card, found)


def _no_driver(card: Card, found: Inventory, wheel: WheelSet) -> str:
    name = "a V100" if card.capability == VOLTA else card.name
    if hidden(card, found):
        return f"{name} is on the PCI bus but not in the driver's list: hidden from this container, or broken"
    if card.capability == VOLTA:
        fix = f"install the {LAST_VOLTA_BRANCH} branch (newer branches drop Volta)"
    else:
        fix = f"install branch {wheel.own_driver} or newer"
    if found.driver is not None:
        return f"{name} is here but driver {found.driver} does not serve it: {fix}"
    why = f" ({found.no_driver})" if found.no_driver else ""
    return f"{name} is here but no driver serves it{why}: {fix}"


def _unserved(card: Card) -> str:
    capability = card.capability or (0, 0)
    if _LEGACY_RANGE[0] <= capability <= _LEGACY_RANGE[1]:
        advice = f"{LEGACY_VARIANT} has them (sm_50 to sm_90)"
    elif capability < _LEGACY_RANGE[0]:
        advice = "no torch that this project supports has them"
    else:
        advice = "look for a newer torch"
    return f"{card.name}, {card.sm}: neither set has kernels for it; {advice}"


def _unknown(card: Card) -> str:
    reason = card.unknown.get("capability", "not found")
    return f"{card.name} at {card.pci_address}: capability unknown ({reason}); `make doctor` tells what torch can do"


def _once(texts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def main() -> int:
    """Reasons for a person on standard error, the file's name for make on standard output."""
    choice = choose(inventory())
    print(f"{choice.constraints_file}: {choice.reason}", file=sys.stderr)
    for text in choice.warnings:
        print(f"  warning: {text}", file=sys.stderr)
    print(choice.constraints_file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
