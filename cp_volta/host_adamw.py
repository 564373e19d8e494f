"""AdamW whose two moments live in pinned host memory and visit the device a slice at a time.

A slice's moments come in, the update is made on the device in float32, and they go back; the next slice comes in
meanwhile on a stream of its own. 8 bytes a parameter cross the bus each way, which a long step hides.
The arithmetic is torch.optim.AdamW's (decoupled decay, Loshchilov & Hutter 2019, arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SLICE = 1 << 24  # elements: 64 MiB of each moment


class HostAdamW(torch.optim.Optimizer):
    """AdamW with `state["exp_avg"]` and `state["exp_avg_sq"]` on the host. Parameters and gradients in float32.

    Sharded parameters (FSDP2's DTensor) are updated where they lie, each rank its own.
    Raises ValueError for half parameters: their updates would vanish in rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype != torch.float32:
                    raise ValueError(f"a parameter in {p.dtype}: HostAdamW takes float32 parameters")
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        if self._stream is not None:
            self._stream.synchronize()  # the host may read the moments now
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's; the moments go to the host again, where torch would put them beside the parameter."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = _on_host(local(state[name]), local(p))

    def host_bytes(self) -> int:
        """What the moments take so far."""
        return sum(s[n].numel() * 4 for s in self.state.values() for n in ("exp_avg", "exp_avg_sq") if n in s)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, data, grad = self.state[p], local(p), local(p.grad)  # type: ignore[arg-type]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = _on_host(None, data)
            state["exp_avg_sq"] = _on_host(None, data)
        state["step"] += 1
        flat, grads = data.view(-1), grad.contiguous().view(-1)
        moments = [state[name] for name in ("exp_avg", "exp_avg_sq")]
        coming = self._fetch(moments, 0, flat)
        for start in range(0, flat.numel(), SLICE):
            here, ready = coming
            if start + SLICE < flat.numel():
                coming = self._fetch(moments, start + SLICE, flat)
            if ready is not None:
                torch.cuda.current_stream(flat.device).wait_event(ready)
            part = slice(start, start + SLICE)
            m, v = here
            _adamw(flat[part], grads[part], m, v, int(state["step"]), group)
            self._put_back(moments, here, part)

    def _fetch(
        self, moments: list[Tensor], start: int, like: Tensor
    ) -> tuple[list[Tensor], torch.cuda.Event | None]:
        parts = [m[start : start + SLICE] for m in moments]
        if not like.is_cuda:
            return parts, None  # they are where they are used
        stream = self._of(like.device)
        here = [torch.empty(len(part), device=like.device) for part in parts]
        stream.wait_stream(torch.cuda.current_stream(like.device))  # their memory may be in use until then
        with torch.cuda.stream(stream):
            for mine, part in zip(here, parts, strict=True):
                mine.copy_(part, non_blocking=True)
            return here, stream.record_event()

    def _put_back(self, moments: list[Tensor], here: list[Tensor], part: slice) -> None:
        if not here[0].is_cuda:
            return
        stream = self._of(here[0].device)
        stream.wait_stream(torch.cuda.current_stream(here[0].device))
        with torch.cuda.stream(stream):
            for moment, mine in zip(moments, here, strict=True):
                moment[part].copy_(mine, non_blocking=True)
                mine.record_stream(stream)

    def _of(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def local(tensor: Tensor) -> Tensor:
    """Of a DTensor the part that this rank holds; any other tensor itself."""
    part = getattr(tensor, "to_local", None)
    found: Tensor = part() if callable(part) else tensor
    return found


def _on_host(values: Tensor | None, like: Tensor) -> Tensor:
    host = torch.zeros(like.numel(), dtype=torch.float32, pin_memory=like.is_cuda)
    if values is not None:
        host.copy_(values.reshape(-1))
    return host


def _adamw(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """In place, as torch.optim.AdamW's single-tensor path orders it."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    p.mul_(1 - lr * group["weight_decay"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
