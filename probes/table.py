"""The probe table: ours, and those of installed packages. Imports declarations only, no torch."""

from __future__ import annotations

import importlib.metadata

from harness.cells import Probe
from harness.errors import HarnessError
from probes import (
    backward_memory,
    bisect,
    cache_pollution,
    collectives,
    compile_matrix,
    cp_parity,
    cp_plan,
    cp_step,
    cudagraph_aliasing,
    determinism,
    fault_drill,
    graph_breaks,
    precision,
    sdpa_backends,
    silent_eager,
    train_step,
    triton_lowering,
    volta_lowering,
)

_OURS = (
    train_step.PROBE,
    cp_step.PROBE,
    cp_parity.PROBE,
    cp_plan.PROBE,
    collectives.PROBE,
    compile_matrix.PROBE,
    silent_eager.PROBE,
    graph_breaks.PROBE,
    cudagraph_aliasing.PROBE,
    backward_memory.PROBE,
    cache_pollution.PROBE,
    sdpa_backends.PROBE,
    precision.PROBE,
    determinism.PROBE,
    bisect.PROBE,
    triton_lowering.PROBE,
    volta_lowering.PROBE,
    fault_drill.PROBE,
)


def table() -> dict[str, Probe]:
    """Every probe by name. A package adds its own with an entry point in the group `harness.probes`.

    Raises HarnessError for an entry point that does not load, is no Probe, or takes a name that is taken.
    """
    probes = {probe.name: probe for probe in _OURS}
    for point in importlib.metadata.entry_points(group="harness.probes"):
        probe = _load(point)
        if probe.name in probes:
            raise HarnessError(
                f"entry point {point.name!r} ({point.value}): a probe {probe.name!r} exists already"
            )
        probes[probe.name] = probe
    return probes


def _load(point: importlib.metadata.EntryPoint) -> Probe:
    try:
        probe = point.load()
    except Exception as error:  # whatever a foreign package raises on import
        raise HarnessError(
            f"entry point {point.name!r} ({point.value}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(probe, Probe):
        raise HarnessError(
            f"entry point {point.name!r} ({point.value}): is a {type(probe).__name__}, not a Probe"
        )
    return probe
