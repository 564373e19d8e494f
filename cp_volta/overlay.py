"""Another forward for one module of a model, and back. The parameters, the hooks and the state_dict stay as they are.

The module becomes an instance of a subclass of the same name, as FSDP2 does it: copies are right, hooks (FSDP2's above
all) still run around the new forward, torch.compile traces it, and a model that nobody holds is freed at once. A bound
method in the instance would be a cycle: gigabytes of a device that wait for the garbage collector.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_KEPT = "_cp_volta_overlay"
_UNDER = "_cp_volta_under"
Forward = Callable[..., Any]


def put(module: nn.Module, forward: Forward, **state: Any) -> None:
    """Let `module(...)` call `forward(module, ...)`; `state` is at hand there as `state_of(module)`.

    Raises ValueError where one is in place already: remove it first.
    """
    if is_on(module):
        raise ValueError(f"{type(module).__name__} is tiled already; untile the model first")
    module.__dict__[_KEPT] = {"before": module.__dict__.pop("forward", None), **state}
    module.__class__ = _over(type(module), forward)  # type: ignore[arg-type]


def remove(module: nn.Module) -> bool:
    """Take the overlay off; whether there was one."""
    if not is_on(module):
        return False
    before = module.__dict__.pop(_KEPT)["before"]
    if before is not None:
        module.__dict__["forward"] = before
    if (
        _UNDER in type(module).__dict__
    ):  # else a class of FSDP2's stands on it, and the forward under it takes over
        module.__class__ = getattr(type(module), _UNDER)
    return True


def state_of(module: nn.Module) -> dict[str, Any]:
    """What `put` was given for this module. Raises KeyError where there is no overlay."""
    state: dict[str, Any] = module.__dict__[_KEPT]
    return state


def is_on(module: nn.Module) -> bool:
    """Whether the module's forward is one of ours."""
    return _KEPT in module.__dict__


def original(module: nn.Module) -> Forward:
    """The forward under the overlay, bound."""
    before = state_of(module)["before"]
    under = [cls.__dict__[_UNDER] for cls in type(module).__mro__ if _UNDER in cls.__dict__]
    forward: Forward = before if before is not None else types.MethodType(under[-1].forward, module)
    return forward


@functools.cache
def _over(cls: type[nn.Module], forward: Forward) -> type[nn.Module]:
    """The subclass whose forward is ours, with the stock signature: transformers drops columns it does not name."""

    @functools.wraps(cls.forward)
    def ours_or_under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (forward if is_on(module) else cls.forward)(module, *args, **kwargs)

    body = {"forward": ours_or_under, "__module__": cls.__module__, "__doc__": cls.__doc__, _UNDER: cls}
    return type(cls.__name__, (cls,), body)
