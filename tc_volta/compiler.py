"""torch.compile with this device's policy, for one model; and a report of what really compiled.

Settings travel through torch.compile's `options`, never through process-wide flags. `suppress_errors` is never
used: after one suppressed failure Dynamo can stop compiling unrelated modules. The fallback is a backend of
ours, which catches an error of Inductor, records it, and runs that one graph eagerly.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from tc_volta.policy import Decision, decision, device_facts, policy

M = TypeVar("M", bound=nn.Module)
Backend = Callable[..., Any]
_DYNAMO = torch._dynamo.exc
# Dynamo's own messages to itself, which a backend must let through.
_NOT_OURS = (_DYNAMO.RestartAnalysis, _DYNAMO.SkipFrame, _DYNAMO.Unsupported)


@dataclass(kw_only=True)
class Report:
    """What was asked for, what was decided, what really compiled. Filled as graphs are compiled."""

    asked: str
    decisions: tuple[Decision, ...]
    options: dict[str, Any]
    graphs: int = 0
    fallbacks: list[str] = field(default_factory=list)  # graphs that run eagerly, with Inductor's error
    skipped: list[str] = field(default_factory=list)  # graphs that the backend had Dynamo skip
    _before: dict[str, collections.Counter[str]] = field(default_factory=dict, repr=False)

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Reason -> count, of everything Dynamo traced since the model was compiled."""
        return _since(self._before, "graph_break")

    @property
    def frames_given_up(self) -> int:
        """Frames that Dynamo itself did not compile since the model was compiled."""
        frames = _since(self._before, "frames")
        return frames.get("total", 0) - frames.get("ok", 0)

    @property
    def eager(self) -> bool:
        """Whether some of what was to be compiled runs eagerly."""
        return bool(self.fallbacks or self.skipped or self.frames_given_up)

    def __str__(self) -> str:
        lines = [f"asked: {self.asked}", f"graphs compiled: {self.graphs}"]
        lines += [f"runs eagerly: {why}" for why in self.fallbacks + self.skipped]
        lines += [f"graph break ({n}x): {why}" for why, n in self.graph_breaks.items()]
        if self.frames_given_up:
            lines.append(f"frames Dynamo gave up: {self.frames_given_up}")
        lines += [f"{d.name} = {d.value}: {d.reason}" for d in self.decisions]
        return "\n".join(lines)


_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def report(model: nn.Module) -> Report:
    """What compiling this model came to. Raises KeyError if it was not compiled by this library."""
    if model not in _reports:
        raise KeyError(f"{type(model).__name__} was not compiled by tc_volta")
    return _reports[model]


def compile(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile the whole model in place; its state_dict keys stay as they are.

    mode: a mode of Inductor ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs").
    options: Inductor settings on top of the mode's. backend: "inductor", or "aot_eager" or "eager" to bisect.
    Raises ValueError for an unknown mode, and for what the device's policy refuses.
    """
    record = _begin(model, "model", mode, options)
    _compile_each([model], record, dynamic, fullgraph, backend)
    return model


def compile_layers(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile each decoder layer in place, alone. Layers of one shape share one graph.

    Parameters and errors are those of `compile`; also ValueError for a model without a list of layers.
    """
    record = _begin(model, "layers", mode, options)
    _compile_each(decoder_layers(model), record, dynamic, fullgraph, backend)
    return model


def compile_mlp_only(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile each layer's MLP in place; attention stays eager.

    Parameters and errors are those of `compile_layers`; also ValueError for a layer without `mlp`.
    """
    record = _begin(model, "mlp", mode, options)
    layers = decoder_layers(model)
    if without := [
        type(layer).__name__ for layer in layers if not isinstance(getattr(layer, "mlp", None), nn.Module)
    ]:
        raise ValueError(f"{without[0]} has no module `mlp` to compile")
    _compile_each([layer.mlp for layer in layers], record, dynamic, fullgraph, backend)  # type: ignore[misc]
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers: `layers` or `model.layers`, as Qwen2, Qwen3 and Llama have them.

    Raises ValueError for a model with neither.
    """
    for path in ("layers", "model.layers"):
        found: object = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
    raise ValueError(f"{type(model).__name__} has no decoder layers: looked for `layers` and `model.layers`")


def _begin(model: nn.Module, what: str, mode: str, options: Mapping[str, Any] | None) -> Report:
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}; there are {', '.join(modes)}")
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    decisions = policy(device_facts(device))
    _refuse(model, decisions)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = decision(decisions, "use_cache").value  # type: ignore[union-attr]
    record = Report(
        asked=f"{what}, mode {mode}",
        decisions=decisions,
        options={**_settings(modes[mode], decisions), **(options or {})},
    )
    record._before = _counters()
    _reports[model] = record
    return record


def _refuse(model: nn.Module, decisions: Iterable[Decision]) -> None:
    refused = {d.name: d for d in decisions if d.refuses}
    if "bf16" in refused and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise ValueError(f"bfloat16 parameters: {refused['bf16'].reason}")


def _settings(mode: Mapping[str, Any], decisions: tuple[Decision, ...]) -> dict[str, Any]:
    """The mode's Inductor settings, less what the device's policy turns off."""
    settings = dict(mode)
    if settings.get("triton.cudagraphs") and not decision(decisions, "cudagraphs").value:
        settings["triton.cudagraphs"] = False
    gemm = {d.name: d.value for d in decisions}.get("triton_gemm_autotune", True)
    if settings.get("max_autotune") and not gemm:
        settings["max_autotune_gemm_backends"] = "ATEN"
    return settings


def _compile_each(
    modules: list[nn.Module], record: Report, dynamic: bool | None, fullgraph: bool, backend: str
) -> None:
    recording = _recording(record, backend)
    for module in modules:
        module.compile(backend=recording, dynamic=dynamic, fullgraph=fullgraph)


def _recording(record: Report, backend: str) -> Backend:
    """A backend that counts graphs, and runs one eagerly, recorded, where the real backend fails on it."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        try:
            compiled = _through(backend, graph, inputs, record.options)
        except _NOT_OURS as message:
            record.skipped.append(f"{type(message).__name__}: {str(message)[:500]}")
            raise
        except Exception as error:  # whatever a compiler raises is this graph's failure, and is reported
            record.fallbacks.append(f"{type(error).__name__}: {str(error)[:2000]}")
            return cast("Callable[..., Any]", graph.forward)
        record.graphs += 1
        return cast("Callable[..., Any]", compiled)

    return compile_graph


def _through(backend: str, graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
    if backend == "inductor":
        return torch._inductor.compile(graph, inputs, options=options)
    return torch._dynamo.lookup_backend(backend)(graph, inputs)


def _counters() -> dict[str, collections.Counter[str]]:
    """A copy of Dynamo's counters, the one place that reads them here."""
    return {name: collections.Counter(values) for name, values in torch._dynamo.utils.counters.items()}


def _since(before: dict[str, collections.Counter[str]], name: str) -> dict[str, int]:
    now = collections.Counter(torch._dynamo.utils.counters.get(name, {}))
    return dict(now - before.get(name, collections.Counter()))
