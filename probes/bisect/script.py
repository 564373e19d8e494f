"""A failing module as a script that depends on torch alone: its graph as code, its tensors in a file beside it.

The script takes one forward and backward under the backend that TORCH_COMPILE_BACKEND names (torch's bisector sets
it), and exits with 0 where outputs and gradients are right, 1 where they are wrong, and by an exception or a signal
where the compiler breaks. It holds the compiled run to eager and to float64, by the bars of `probes.parity` without
their exceptions for biases.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes import float64

SCRIPT = "repro.py"
_HEAD = '''"""{title}

Made by `python -m harness.probe bisect`; depends on torch alone (written with torch {version}).

    python {script}                              default: inductor
    TORCH_COMPILE_BACKEND=aot_eager python {script}
    python -m torch._inductor.compiler_bisector run python {script}

Exit code 0: outputs and gradients are right; 1: they are wrong; anything else: the compiler broke.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch import device, inf, nan  # the graph's code names them

OPTIONS = {options!r}
DYNAMIC, DTYPE, SCALE = {dynamic!r}, {dtype}, {scale!r}
'''
_JUDGE = '''

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[DTYPE]


def step(call, tensors):
    """One forward and backward: the outputs, and the gradient of each input that takes one."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    outputs = [o for o in call(*leaves) if isinstance(o, torch.Tensor)]
    (outputs[-1].sum() * SCALE).backward()  # the loss is the last output
    found = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    return found | {f"gradient of {NAMES[i]}": t.grad for i, t in enumerate(leaves) if t.grad is not None}


def wrong(name, x, eager, exact):
    """Why x is wrong, or ""."""
    if x is None or x.shape != exact.shape or x.dtype != eager.dtype:
        return f"{name}: missing, or of another shape or dtype"
    if not torch.isfinite(x).all():
        return f"{name}: {int((~torch.isfinite(x)).sum())} elements are not finite"
    x, eager, exact = x.double().flatten(), eager.double().flatten(), exact.double().flatten()
    norm = exact.norm().item()
    error, own = ((t - exact).norm().item() / norm if norm else t.norm().item() for t in (x, eager))
    factor = 8.0 if x.numel() < 2048 else 2.0
    bar = max(0.8 * UNIT, min(factor * own, max(0.5, 2.0 * own))) if own < 1.0 else 10.0 * own
    if not error <= bar:
        return f"{name}: error {error:.2e}, eager's own {own:.2e}, bar {bar:.2e}"
    unit = exact.abs() + norm / math.sqrt(max(1, exact.numel()))
    off, own_off = (((t - exact).abs() / unit.clamp_min(1e-300)).max().item() for t in (x, eager))
    if x.numel() >= 2048 and off > 8.0 * max(own_off, UNIT):
        return f"{name}: an element is off by {off:.2e}, eager's largest {own_off:.2e}"
    return ""


def main():
    tensors = torch.load(Path(__file__).with_name("inputs.pt"))
    backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")
    options = dict(OPTIONS) if backend == "inductor" else None
    if os.environ.get("REPRO_CUDAGRAPHS") == "0" and options:
        options["triton.cudagraphs"] = False
    eager = step(graph, tensors)
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]
    with float64_everywhere():
        exact = step(graph, wide)
    candidate = step(torch.compile(graph, backend=backend, options=options, dynamic=DYNAMIC), tensors)
    found = [w for name in exact if (w := wrong(name, candidate.get(name), eager[name], exact[name]))]
    print(f"{backend}: " + (found[0] + f" ({len(found)} wrong)" if found else "right"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
'''


def write(
    folder: Path,
    call: Callable[..., Any],
    batch: Sequence[Tensor],
    *,
    title: str,
    options: dict[str, Any],
    dynamic: bool,
    dtype: torch.dtype,
    scale: float,
) -> Path:
    """Write repro.py and inputs.pt for `call(*batch)`, which must be one graph. Returns the script's path.

    Raises ValueError where Dynamo makes several graphs of it, or where the graph holds what no script can name.
    """
    graph, tensors = _captured(call, batch)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "inputs.pt")
    names = [str(n.target).strip("_") for n in graph.graph.nodes if n.op == "placeholder"]
    head = _HEAD.format(
        title=title,
        version=torch.__version__,
        script=SCRIPT,
        options=options,
        dynamic=dynamic,
        dtype=dtype,
        scale=scale,
    )
    parts = [head, f"NAMES = {names!r}\n\n", _function(graph), "\n\n", _widening(), _JUDGE]
    path = folder / SCRIPT
    source = "".join(parts)
    try:
        compile(source, str(path), "exec")
    except SyntaxError as error:  # an object in the graph that has no name a script could use
        raise ValueError(f"the graph cannot be written as code: {error}") from error
    path.write_text(source)
    return path


def _captured(call: Callable[..., Any], batch: Sequence[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The one graph, and the tensors it is called with: parameters and buffers are inputs of it."""
    graphs: list[torch.fx.GraphModule] = []
    calls: list[list[Tensor]] = []

    def keep(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)

        def once(*tensors: Any) -> Any:
            calls.append([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
            return graph(*tensors)

        return once

    torch._dynamo.reset()
    torch.compile(call, backend=keep, dynamic=False)(*batch)
    torch._dynamo.reset()
    if len(graphs) != 1 or len(calls) != 1:
        raise ValueError(f"Dynamo makes {len(graphs)} graphs of this module; a script is written of one")
    if odd := [n.target for n in graphs[0].graph.nodes if n.op in ("get_attr", "call_module")]:
        raise ValueError(f"the graph holds {len(odd)} objects that are no inputs, {odd[0]} first")
    return graphs[0], calls[0]


def _function(graph: torch.fx.GraphModule) -> str:
    """The graph's code as a plain function, with the modules that fx names behind its back imported."""
    body = graph._graph.python_code("self")
    lines = [_import(name, value) for name, value in body.globals.items() if name not in _GIVEN]
    source = body.src.replace("def forward(self, ", "def graph(", 1).replace(
        "def forward(self)", "def graph()"
    )
    return "\n".join(["import torch.nn.functional", *lines, "", source.strip(), ""])


_GIVEN = ("torch", "device", "inf", "nan", "NoneType")


def _import(name: str, value: object) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and path and module.split(".")[0] in ("torch", "builtins", "math", "operator"):
        return f"import {module}\n{name} = {module}.{path}"
    return f"{name} = {value!r}"


def _widening() -> str:
    """`probes.float64` itself: it depends on torch alone."""
    source = inspect.getsource(float64)
    after = source.split("from __future__ import annotations\n", 1)[1]
    return "# Below: a float64 reference that is float64 throughout.\n" + after
