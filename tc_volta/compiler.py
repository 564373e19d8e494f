"""torch.compile with this device's policy, for one model: all of it, each decoder layer, or each layer's MLP.

Settings travel through torch.compile's backend for that model, never through process-wide flags. Models are
compiled in place, with Module.compile: the same object comes back, and its state_dict keys stay as they are.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from tc_volta.backend import recording
from tc_volta.batch import noting_plain
from tc_volta.errors import Unsupported
from tc_volta.policy import Decision, DeviceFacts, decision, policy
from tc_volta.report import Report, keep

M = TypeVar("M", bound=nn.Module)
Device = torch.device | str | DeviceFacts


def compile(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    device: Device | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile the whole model in place. Compiling again replaces what was compiled before.

    mode: a mode of Inductor ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs").
    device: whose policy rules; the parameters' own by default.
    options: Inductor settings, over the mode's and over the policy's (the report notes it).
    backend: "inductor", or another of Dynamo's, "aot_eager" or "eager" to bisect.
    Raises ValueError for an unknown mode, option or backend, and Unsupported for what the device's policy refuses.
    """
    record = _planned(model, "model", mode, device, options, backend)
    _compile_each(model, [model], record, dynamic, fullgraph, backend)
    model._compiled_call_impl = noting_plain(model, cast("Any", model._compiled_call_impl))
    return model


def compile_layers(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    device: Device | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile each decoder layer in place, alone. Layers of one shape share one graph.

    Parameters and errors are those of `compile`; also ValueError for a model without a list of layers.
    """
    layers = decoder_layers(model)
    record = _planned(model, "layers", mode, device, options, backend)
    _compile_each(model, layers, record, dynamic, fullgraph, backend)
    return model


def compile_mlp_only(
    model: M,
    *,
    mode: str = "default",
    dynamic: bool | None = False,
    fullgraph: bool = False,
    device: Device | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> M:
    """Compile each layer's MLP in place; attention stays eager.

    Parameters and errors are those of `compile_layers`; also ValueError for a layer without `mlp`.
    """
    mlps = [_mlp(layer) for layer in decoder_layers(model)]
    record = _planned(model, "mlp", mode, device, options, backend)
    _compile_each(model, mlps, record, dynamic, fullgraph, backend)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers: `layers` or `model.layers`, as Qwen2, Qwen3 and Llama have them.

    Raises Unsupported for a model with neither.
    """
    for path in ("layers", "model.layers"):
        found: object = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
    raise Unsupported(f"{type(model).__name__} has no decoder layers: looked for `layers` and `model.layers`")


def _mlp(layer: nn.Module) -> nn.Module:
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, nn.Module):
        raise Unsupported(f"{type(layer).__name__} has no module `mlp` to compile")
    return mlp


def _planned(
    model: nn.Module,
    what: str,
    mode: str,
    device: Device | None,
    options: Mapping[str, Any] | None,
    backend: str,
) -> Report:
    """Everything decided and checked, and nothing touched yet."""
    modes = torch._inductor.list_mode_options()
    _known("mode", mode, modes)
    _known("backend", backend, ["inductor", *torch._dynamo.list_backends(None)])
    for name in options or {}:
        _known("Inductor option", name, torch._inductor.list_options())
    parameter = next(model.parameters(), None)
    if device is None:
        device = parameter.device if parameter is not None else "cpu"
    decisions = policy(device)
    _refuse(model, decisions)
    settings, notes = _settled(mode, modes[mode], decisions, options or {})
    return Report(asked=f"{what}, mode {mode}", decisions=decisions, options=settings, notes=notes)


def _known(what: str, word: str, words: Iterable[str]) -> None:
    words = list(words)
    if word not in words:
        near = difflib.get_close_matches(word, words, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words[:20])}"
        raise ValueError(f"unknown {what} {word!r}; {hint}")


def _refuse(model: nn.Module, decisions: Iterable[Decision]) -> None:
    refused = {d.name: d for d in decisions if d.refuses}
    if "bf16" in refused and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise Unsupported(f"bfloat16 parameters: {refused['bf16'].reason}")


def _settled(
    mode: str, of_mode: Mapping[str, Any], decisions: tuple[Decision, ...], options: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The mode's Inductor settings, less what the policy turns off, under the caller's; and where they differ."""
    settings, notes = {**of_mode, **options}, []
    off = {d.name: d for d in decisions if d.value is False}
    for name, trigger, setting, value in (
        ("cudagraphs", "triton.cudagraphs", "triton.cudagraphs", False),
        ("triton_gemm_autotune", "max_autotune", "max_autotune_gemm_backends", "ATEN"),
    ):
        if name not in off or not settings.get(trigger):
            continue
        if setting in options:
            notes.append(f"options set {setting} = {options[setting]} against the policy: {off[name].reason}")
        else:
            settings[setting] = value
            notes.append(f"mode {mode}, less what the policy turns off: {setting} = {value}")
    return settings, tuple(notes)


def _compile_each(
    model: nn.Module,
    modules: list[nn.Module],
    record: Report,
    dynamic: bool | None,
    fullgraph: bool,
    backend: str,
) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = decision(record.decisions, "use_cache").value  # type: ignore[union-attr]
    for module in model.modules():
        module._compiled_call_impl = None  # what Module.compile sets; it has no public undo
    keep(model, record)
    how: dict[str, Any] = {"backend": recording(record, backend), "dynamic": dynamic, "fullgraph": fullgraph}
    code = _entry(model).__code__.replace()
    for module in modules:
        if type(module).forward.__module__.startswith("torch."):
            module._compiled_call_impl = torch.compile(_entry(module, code), **how)
        else:
            module.compile(**how)


def _entry(module: nn.Module, code: types.CodeType | None = None) -> types.FunctionType:
    """A way into a module of torch's own, nn.Sequential say, which Module.compile leaves eager without a word.

    Dynamo skips frames of torch's files. Each model brings a copy of the code, since Dynamo keeps graphs, and
    counts them against its limit, by code object.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    entry = cast("types.FunctionType", forward)
    entry.__code__ = code or entry.__code__
    return entry
