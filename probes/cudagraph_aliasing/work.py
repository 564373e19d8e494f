"""The scenario three times: by the compiler under test, eagerly, and in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from harness.cells import Task
from harness.rows import Parity, Result, Verdict
from probes.compile_matrix import MatrixAxes
from probes.compile_matrix.cases import Batch, batches, case, loss_scale, widened
from probes.cudagraph_aliasing import AliasingAxes
from probes.cudagraph_aliasing.static import backend
from probes.float64 import float64_everywhere
from probes.models.build import DTYPES
from probes.parity import compare

ROUNDS = 5  # a graph is warmed up, recorded, and only then replayed
_REFUSED = "overwritten by a subsequent run"
_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
Call = Callable[..., tuple[Tensor, Tensor]]
Observed = dict[str, Tensor]


def run(axes: AliasingAxes, task: Task) -> Result:
    """ok: right. mismatch: wrong, and nothing said so. caveat: torch refused it with an error, and said why."""
    cell = MatrixAxes(model=axes.model, dtype=axes.dtype)
    module = case(cell, task.device, task.seed)
    given = batches(cell, 2 * ROUNDS, task.device, task.seed)
    scale = loss_scale(cell)
    true, wide = widened(module), [_wide(batch) for batch in given]
    with float64_everywhere():
        want = observe(axes.scenario, true, true, wide, scale)
    eager = observe(axes.scenario, module, module, given, scale)
    module.zero_grad(set_to_none=True)
    call = _compiled(module, axes)
    try:
        with _counting(task.device) as launched:
            got = observe(axes.scenario, module, call, given, scale)
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        return _result(axes, "caveat", f"refused with an error: {_sentence(error)}", "refused", 0)
    if axes.memory == "cudagraphs" and not launched():
        return Result(status="unsupported", reason="no CUDA graph was launched: nothing was put to the test")
    found = compare(got, eager, want, dtype=DTYPES[axes.dtype], reference_name="float64, the same scenario")
    outcome = "right" if found.verdict in ("ok", "caveat") else "wrong in silence"
    return _result(axes, found.verdict, f"{outcome}: {found.reason}", outcome, launched(), found)


def observe(scenario: str, module: nn.Module, call: Call, given: list[Batch], scale: float) -> Observed:
    """What a user of the scenario reads, round by round; `call` is `module`, or what a compiler made of it."""
    if scenario.startswith("accumulate"):
        return _accumulate(scenario, module, call, given, scale)
    seen: Observed = {}
    held: Observed = {}
    for number, batch in enumerate(given[:ROUNDS]):
        module.zero_grad(set_to_none=True)
        output, loss = call(*batch)
        (loss * scale).backward()
        seen |= {name: tensor.detach().clone() for name, tensor in held.items()}  # of the round before
        held = {f"round {number} {name}": one for name, one in _kept(scenario, module, output)}
    return seen


def _kept(scenario: str, module: nn.Module, output: Tensor) -> Iterator[tuple[str, Tensor]]:
    if scenario == "held-grads":
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad
    else:
        yield "output", output.detach().clone() if scenario == "copied-outputs" else output


def _accumulate(scenario: str, module: nn.Module, call: Call, given: list[Batch], scale: float) -> Observed:
    seen: Observed = {}
    if scenario == "accumulate-owned":
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    in_place = scenario in ("accumulate-zeroed", "accumulate-owned")
    pairs = zip(given[::2], given[1::2], strict=True)
    for number, pair in enumerate(pairs):
        module.zero_grad(set_to_none=not in_place)
        for batch in pair:
            if scenario == "accumulate-marked":
                torch.compiler.cudagraph_mark_step_begin()
            (call(*batch)[1] * scale).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                seen[f"round {number} {name}"] = parameter.grad.detach().clone()
    return seen


def _compiled(module: nn.Module, axes: AliasingAxes) -> Call:
    if axes.memory == "static":
        return torch.compile(module, backend=backend())  # type: ignore[return-value]
    mode = "reduce-overhead" if axes.memory == "cudagraphs" else "default"
    return torch.compile(module, mode=mode)  # type: ignore[return-value]


def _wide(batch: Batch) -> Batch:
    return tuple(
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in batch
    )


@contextlib.contextmanager
def _counting(device: str) -> Iterator[Callable[[], int]]:
    """How many graphs were launched within; 0 on a CPU."""
    if device != "cuda":
        yield lambda: 0
        return
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield lambda: sum(event.name in _LAUNCHES for event in seen.events() or ())
        torch.cuda.synchronize()


def _result(
    axes: AliasingAxes,
    verdict: Verdict,
    reason: str,
    outcome: str,
    launches: int,
    parity: Parity | None = None,
) -> Result:
    static = axes.memory == "static"
    note = "emulated: results at fixed addresses, as a replayed graph leaves them; no CUDA graph was involved"
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        parity=parity,
        facts={"outcome": outcome, "graph_launches": launches},
        notes=(note,) if static else (),
    )


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
