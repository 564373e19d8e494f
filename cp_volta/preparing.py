"""`prepare(model, seq=…)`: a transformers Qwen2, Qwen3 or Llama made ready for the longest step that fits, in one call.

    ready = prepare(model, seq=131_072)          # fp32 parameters: autocast to fp16, GradScaler, AdamW
    print(ready.text())                          # what was decided, and why
    with ready.autocast():
        loss = model(input_ids=ids, labels=ids).loss
    ready.scaler.scale(loss).backward()
    ready.scaler.step(ready.optimizer)
    ready.scaler.update()

Full or LoRA: what requires a gradient is trained, so wrap the model with peft first. Sharded: give the mesh over
which FSDP2 is to spread parameters, gradients and states, and patch the model for context parallelism first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tc_volta
from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
from cp_volta.host_adamw import HostAdamW
from cp_volta.host_memory import available_bytes
from cp_volta.offload import Offloader
from cp_volta.planning import Decision, Plan, gib, plan
from cp_volta.rows import served_by
from cp_volta.step import KERNELS, STATE_BYTES, Optimizer, Shape, Work
from cp_volta.tiling import causal_model, tile, untile

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made. The model is the caller's own, changed in place."""

    model: nn.Module
    plan: Plan
    decisions: tuple[Decision, ...]
    dtype: torch.dtype
    amp: bool
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler
    offloader: Offloader | None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """For the forward; nothing where parameters are in the compute dtype, or FSDP2 casts them."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.dtype, enabled=self.amp)

    def text(self) -> str:
        """Every decision with its reason, and the predicted peak by part."""
        own = [f"{d.name}: {d.value} ({d.reason})" for d in self.decisions]
        return "\n".join([*own, self.plan.text()])


def prepare(
    model: nn.Module,
    *,
    seq: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    optimizer: Optimizer = "adamw",
    lr: float = 1e-5,
    budget_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    attention: str = "auto",
    cp_size: int = 1,
    mesh: Any = None,
) -> Prepared:
    """Plan a step of `batch` sequences of `seq` tokens, and set the model up for it: attention, tiles, checkpoints.

    dtype: to compute in. Parameters in fp32 and another dtype mean autocast (GradScaler with fp16).
    optimizer: none (forward and backward only), adamw, adamw8bit (bitsandbytes), adamw_host (states on the host).
    budget_bytes: for the allocator on one device; what is free there now, and what torch holds, unless said.
    host_limit_bytes: for checkpoints, of this process; 80 % of what is available unless said.
    attention: a kernel of tc_volta, "auto", or "keep" for what the model has (with context parallelism).
    cp_size: ranks that one sequence is spread over. mesh: FSDP2's; None: nothing is sharded.
    Raises ValueError, the model as it was: what cannot be tiled, what does not fit, fp16 parameters with an optimizer.
    """
    inner = causal_model(model)
    _check(model, seq, cp_size, dtype, optimizer)
    device = next(model.parameters()).device
    shape = shape_of(inner)
    amp = mesh is None and any(p.dtype != dtype for p in model.parameters())  # adapters in float32 count too
    kernel, why = _kernel(inner, attention, dtype, seq, device)
    work = _work(model, batch * seq // cp_size, dtype, optimizer, kernel, 1 if mesh is None else mesh.size())
    work = dataclasses.replace(work, cp=cp_size)
    budget = _budget(device) if budget_bytes is None else budget_bytes
    host = int(available_bytes() * 0.8) if host_limit_bytes is None else host_limit_bytes
    made = plan(shape, work, budget_bytes=budget, host_limit_bytes=host)
    decisions = _decisions(inner, seq, amp, dtype, kernel, why, optimizer, mesh, budget)
    offloader = _set_up(model, inner, made, attention, host)
    if mesh is not None:
        _shard(inner, mesh, dtype)
    return Prepared(
        model=model,
        plan=made,
        decisions=decisions,
        dtype=dtype,
        amp=amp,
        optimizer=make_optimizer(model, optimizer, lr),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16 and optimizer != "none"),
        offloader=offloader,
    )


def unprepare(model: nn.Module) -> None:
    """Take tiles and checkpoints off again. The attention implementation and sharding stay."""
    untile(model)
    uncheckpoint(model)


def shape_of(model: nn.Module) -> Shape:
    """The numbers of a transformers configuration that decide memory."""
    config: Any = model.config
    return Shape(
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
    )


def make_optimizer(model: nn.Module, kind: Optimizer, lr: float) -> torch.optim.Optimizer | None:
    """The optimizer over what requires a gradient; None for "none". Raises ValueError without bitsandbytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "none":
        return None
    if kind == "adamw_host":
        return HostAdamW(trained, lr=lr)
    if kind == "adamw":  # fused: the default makes temporaries of the parameters' size
        return torch.optim.AdamW(trained, lr=lr, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(f"optimizer adamw8bit needs bitsandbytes: {error}") from None
    made: torch.optim.Optimizer = AdamW8bit(trained, lr=lr)
    return made


def _check(model: nn.Module, seq: int, cp_size: int, dtype: torch.dtype, optimizer: str) -> None:
    if optimizer not in STATE_BYTES:
        raise ValueError(f"unknown optimizer {optimizer!r}; there are {', '.join(STATE_BYTES)}")
    if seq < 1 or cp_size < 1 or seq % cp_size:
        raise ValueError(f"a sequence of {seq} tokens cannot be spread evenly over {cp_size} ranks")
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    if optimizer != "none" and torch.float16 in trained:
        raise ValueError(
            "parameters to train are in float16: GradScaler refuses them, and updates would vanish in rounding; "
            "load the model in float32 (autocast computes in float16), or train adapters in float32"
        )
    if torch.device(next(model.parameters()).device).type == "cuda":
        refused = [d for d in tc_volta.policy(next(model.parameters()).device) if d.refuses]
        if dtype == torch.bfloat16 and any(d.name == "bf16" for d in refused):
            raise ValueError(next(d.reason for d in refused if d.name == "bf16"))


def _kernel(
    inner: nn.Module, attention: str, dtype: torch.dtype, seq: int, device: torch.device
) -> tuple[str, str]:
    """(the kernel that the formulas are to count, why)."""
    if device.type != "cuda":
        return "cpu", "there is no CUDA device"
    shape, kept = shape_of(inner), ""
    request = tc_volta.Request(
        device="cuda",
        capability=torch.cuda.get_device_capability(device),
        dtype=dtype,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        seq_q=seq,
        seq_k=seq,
        causal=True,
    )
    if attention == "keep":
        attention, kept = _kept(inner), "the model's own attention is kept"
    chosen = tc_volta.choose(request, attention)
    if chosen.kernel not in KERNELS:
        raise ValueError(f"no fused attention kernel serves a long context here: {chosen.reason}")
    return chosen.kernel, kept or chosen.reason


def _kept(inner: nn.Module) -> str:
    """Which of tc_volta's kernels the model's attention is; "auto" where it is another's, sdpa say."""
    own = inner.config._attn_implementation  # type: ignore[union-attr]
    return next((name for name in tc_volta.KERNELS if tc_volta.attention_name(name) == own), "auto")


def _work(
    model: nn.Module, tokens: int, dtype: torch.dtype, optimizer: Optimizer, kernel: str, shards: int
) -> Work:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    own = next(causal_model(model).parameters()).itemsize
    return Work(
        tokens=tokens,
        param_bytes=own,
        residual_bytes=own if shards == 1 else dtype.itemsize,
        compute_bytes=dtype.itemsize,
        optimizer=optimizer,
        shards=shards,
        trainable=trained / sum(p.numel() for p in parameters),
        kernel=kernel,
    )


def _budget(device: torch.device) -> int:
    """What the allocator can have: free memory and what is torch's already; on a CPU the host's."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _set_up(model: nn.Module, inner: nn.Module, made: Plan, attention: str, host: int) -> Offloader | None:
    choice = made.choice
    tile(
        model,
        loss=choice.loss,
        mlp=choice.mlp or False,
        norms=choice.norms or False,
        projections=choice.projections or False,
    )
    inner.config.use_cache = False  # type: ignore[union-attr]
    if attention != "keep":
        inner.set_attn_implementation(tc_volta.attention_name(attention))  # type: ignore[operator]
    limit = {"host_limit_bytes": host} if choice.offloaded else {}
    return checkpoint_layers(model, choice.checkpointed, offload=choice.offloaded, **limit)  # type: ignore[arg-type]


def _shard(inner: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
    """FSDP2 over `mesh`: fp32 shards, computation in `dtype`, gradients reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in inner.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
    fully_shard(inner, mesh=mesh, mp_policy=policy)


def _decisions(
    inner: nn.Module,
    seq: int,
    amp: bool,
    dtype: torch.dtype,
    kernel: str,
    why: str,
    optimizer: str,
    mesh: Any,
    budget: int,
) -> tuple[Decision, ...]:
    own, name = next(inner.parameters()).dtype, str(dtype).removeprefix("torch.")
    how = "FSDP2 casts shards" if mesh is not None else "autocast" if amp else "the parameters' own dtype"
    scaled = "with GradScaler" if dtype == torch.float16 and optimizer != "none" else "unscaled"
    rows, rows_why = served_by(next(inner.parameters()).device.type)
    decisions = [
        Decision(name="precision", value=f"{name}, {scaled}", reason=f"parameters in {own}: {how}"),
        Decision(name="attention", value=kernel, reason=why),
        Decision(name="rows of a tile", value=rows, reason=rows_why),
        Decision(name="optimizer", value=optimizer, reason="as asked"),
        Decision(name="budget", value=gib(budget), reason="of the device's allocator"),
    ]
    window = getattr(inner.config, "max_position_embeddings", seq)
    if seq > window:
        rope = getattr(inner.config, "rope_parameters", None) or {}
        decisions.append(
            Decision(
                name="positions",
                value=f"{seq} tokens, RoPE {rope.get('rope_type', 'default')}",
                reason=f"beyond the model's native window of {window}: it trains, but give it a RoPE scaling",
            )
        )
    return tuple(decisions)
