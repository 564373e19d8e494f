"""Another forward for one module of a model, and back. The class, the parameters and the state_dict stay as they are.

The new forward is a bound method in the instance's own dictionary, so that deepcopy binds it to the copy, hooks
(FSDP2's above all) still run around it, and torch.compile traces it. What stood there before comes back on removal.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

_KEPT = "_cp_volta_overlay"
Forward = Callable[..., Any]


def put(module: nn.Module, forward: Forward, **state: Any) -> None:
    """Let `module(...)` call `forward(module, ...)`; `state` is at hand there as `state_of(module)`.

    Raises ValueError where one is in place already: remove it first.
    """
    if _KEPT in module.__dict__:
        raise ValueError(f"{type(module).__name__} is tiled already; untile the model first")
    module.__dict__[_KEPT] = {"before": module.__dict__.get("forward"), **state}
    module.__dict__["forward"] = types.MethodType(forward, module)


def remove(module: nn.Module) -> bool:
    """Take the overlay off; whether there was one."""
    if _KEPT not in module.__dict__:
        return False
    before = module.__dict__.pop(_KEPT)["before"]
    del module.__dict__["forward"]
    if before is not None:
        module.__dict__["forward"] = before
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
    forward: Forward = before if before is not None else types.MethodType(type(module).forward, module)
    return forward
