"""What tc_volta decides for each kind of device here, with its reasons."""

from __future__ import annotations

from harness.hardware import Inventory
from probes.doctor import installed
from probes.doctor.kernels import called, devices
from probes.doctor.report import Line

TITLE = "decisions of tc_volta"


def lines(found: Inventory) -> list[Line]:
    """One line per decision; by capability alone, so a card that torch cannot use yet is answered for too."""
    torch, reason = installed.torch_or_reason()
    if torch is None:
        return [Line(what="all", value="unknown", mark="note", reason=reason)]
    from tc_volta import DeviceFacts, policy

    rows = []
    for kind, capability in devices(found):
        facts = DeviceFacts(
            kind=kind,
            capability=capability,
            torch=torch.__version__.split("+")[0],
            triton=installed.version("triton") or "",
            cudnn=(torch.backends.cudnn.version() or 0) if torch.version.cuda else 0,
        )
        for one in policy(facts):
            value = f"{'on' if one.value else 'off'}" if isinstance(one.value, bool) else one.value
            value = "refused" if one.refuses else value
            what = f"{called(kind, capability)} {one.name}"
            rows.append(Line(what=what, value=value, reason=f"{one.reason} [{one.source}]"))
    return rows
