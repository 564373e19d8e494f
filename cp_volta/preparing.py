"""`prepare(model, seq=…)`: a transformers Qwen2, Qwen3 or Llama made ready for the longest step that fits, in one call.

    ready = prepare(model, seq=131_072)          # fp32 parameters: autocast to fp16, GradScaler, AdamW
    print(ready.text())                          # what was decided, and why
    loss = ready.loss({"input_ids": ids, "labels": ids})
    ready.scaler.scale(loss).backward()
    ready.scaler.step(ready.optimizer)
    ready.scaler.update()

Full or LoRA: what requires a gradient is trained, so wrap the model with peft first. Over several ranks the same with
`cp=init_cp_group(…)`: attention reaches over them, FSDP2 spreads parameters, gradients and states over dp x cp.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tc_volta
from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
from cp_volta.gradients import grad_scaler, sum_gradients
from cp_volta.group import CpGroup
from cp_volta.host_adamw import HostAdamW
from cp_volta.host_memory import available_bytes
from cp_volta.offload import Offloader
from cp_volta.patch import patch_for_cp
from cp_volta.planning import Decision, Plan, gib, plan
from cp_volta.prepared import Prepared
from cp_volta.rows import served_by
from cp_volta.step import EIGHT_BIT_SHARDED, KERNELS, STATE_BYTES, Optimizer, Shape, Work
from cp_volta.tiling import causal_model, tile, untile

HALF = (torch.float16, torch.bfloat16)


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
    cp: CpGroup | None = None,
) -> Prepared:
    """Plan a step of `batch` sequences of `seq` tokens, and set the model up for it: attention, tiles, checkpoints.

    dtype: to compute in. Parameters in fp32 and another dtype mean autocast (GradScaler with fp16).
    optimizer: none (forward and backward only), adamw, adamw8bit (bitsandbytes), adamw_host (states on the host).
    budget_bytes: for the allocator on one device; what is free there now, and what torch holds, unless said.
    host_limit_bytes: for checkpoints, of this process; its share of 80 % of what is available unless said.
    attention: a kernel of tc_volta, "auto", or "keep" for what the model has.
    cp: the ranks; `seq` is then the whole sequence that cp.size of them share, and FSDP2 shards over all.
    Raises ValueError, the model as it was: what cannot be tiled, what does not fit, fp16 parameters with an optimizer.
    """
    inner = causal_model(model)
    _check(model, seq, cp, dtype, optimizer)
    device = next(model.parameters()).device
    shape = shape_of(inner)
    amp = cp is None and any(p.dtype != dtype for p in model.parameters())  # adapters in float32 count too
    kernel, why = _kernel(inner, attention, dtype, seq, device)
    work = _work(model, batch * seq, dtype, optimizer, kernel, cp)
    budget = _budget(device) if budget_bytes is None else budget_bytes
    host = _host_share() if host_limit_bytes is None else host_limit_bytes
    if cp is not None:
        budget, host = _agreed(cp, budget, host)
    made = plan(shape, work, budget_bytes=budget, host_limit_bytes=host)
    decisions = _decisions(inner, seq, amp, dtype, kernel, why, optimizer, cp, budget)
    offloader = _set_up(model, inner, made, attention, host, cp)
    if cp is not None:
        _shard(inner, cp, dtype)
    return Prepared(
        model=model,
        plan=made,
        decisions=decisions,
        dtype=dtype,
        amp=amp,
        optimizer=make_optimizer(model, optimizer, lr),
        scaler=_scaler(device.type, dtype == torch.float16 and optimizer != "none", cp),
        offloader=offloader,
        cp=cp,
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


def _check(model: nn.Module, seq: int, cp: CpGroup | None, dtype: torch.dtype, optimizer: str) -> None:
    cp_size = 1 if cp is None else cp.size
    if optimizer not in STATE_BYTES:
        raise ValueError(f"unknown optimizer {optimizer!r}; there are {', '.join(STATE_BYTES)}")
    if seq < 1 or cp_size < 1 or seq % cp_size:
        raise ValueError(f"a sequence of {seq} tokens cannot be spread evenly over {cp_size} ranks")
    if cp is not None and optimizer == "adamw8bit":
        raise ValueError(EIGHT_BIT_SHARDED)
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
    model: nn.Module, tokens: int, dtype: torch.dtype, optimizer: Optimizer, kernel: str, cp: CpGroup | None
) -> Work:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    own = next(causal_model(model).parameters()).itemsize
    shared, shards = (1, 1) if cp is None else (cp.size, cp.mesh.size())
    return Work(
        tokens=tokens // shared,
        param_bytes=own,
        residual_bytes=own if cp is None else dtype.itemsize,
        compute_bytes=dtype.itemsize,
        optimizer=optimizer,
        shards=shards,
        cp=shared,
        trainable=trained / sum(p.numel() for p in parameters),
        kernel=kernel,
    )


def _budget(device: torch.device) -> int:
    """What the allocator can have: free memory and what is torch's already; on a CPU the host's."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _host_share() -> int:
    """Of 80 % of what the host has, what falls to one of the processes that torchrun started on it."""
    return int(available_bytes() * 0.8) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _agreed(cp: CpGroup, *limits: int) -> list[int]:
    """The least of every rank's: with plans of their own, ranks would exchange in layers that others do not run."""
    least = torch.tensor(limits, device=cp.mesh.device_type)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=cp.dp_cp_group)
    return [int(limit) for limit in least]


def _set_up(
    model: nn.Module, inner: nn.Module, made: Plan, attention: str, host: int, cp: CpGroup | None
) -> Offloader | None:
    choice = made.choice
    tile(
        model,
        loss=choice.loss,
        mlp=choice.mlp or False,
        norms=choice.norms or False,
        projections=choice.projections or False,
    )
    inner.config.use_cache = False  # type: ignore[union-attr]
    if attention != "keep" and cp is not None and cp.size > 1:
        _reach_over(inner, cp, attention)
    elif attention != "keep":
        inner.set_attn_implementation(tc_volta.attention_name(attention))  # type: ignore[operator]
    limit = {"host_limit_bytes": host} if choice.offloaded else {}
    return checkpoint_layers(model, choice.checkpointed, offload=choice.offloaded, **limit)  # type: ignore[arg-type]


def _reach_over(inner: nn.Module, cp: CpGroup, kernel: str) -> None:
    try:
        patch_for_cp(inner, cp, kernel=kernel)
    except ValueError:
        unprepare(inner)
        raise


def _shard(inner: nn.Module, cp: CpGroup, dtype: torch.dtype) -> None:
    """FSDP2 over dp x cp: fp32 shards, computation in `dtype`, gradients summed in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in inner.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=cp.dp_cp_mesh, mp_policy=policy)  # type: ignore[arg-type]
    fully_shard(inner, mesh=cp.dp_cp_mesh, mp_policy=policy)
    sum_gradients(inner, cp)


def _scaler(device: str, enabled: bool, cp: CpGroup | None) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, enabled=enabled) if cp is None else grad_scaler(cp, enabled=enabled)


def _decisions(
    inner: nn.Module,
    seq: int,
    amp: bool,
    dtype: torch.dtype,
    kernel: str,
    why: str,
    optimizer: str,
    cp: CpGroup | None,
    budget: int,
) -> tuple[Decision, ...]:
    own, name = next(inner.parameters()).dtype, str(dtype).removeprefix("torch.")
    how = "FSDP2 casts shards" if cp is not None else "autocast" if amp else "the parameters' own dtype"
    scaled = "with GradScaler" if dtype == torch.float16 and optimizer != "none" else "unscaled"
    rows, rows_why = served_by(next(inner.parameters()).device.type)
    decisions = [
        Decision(name="precision", value=f"{name}, {scaled}", reason=f"parameters in {own}: {how}"),
        Decision(name="attention", value=kernel, reason=why),
        Decision(name="rows of a tile", value=rows, reason=rows_why),
        Decision(name="optimizer", value=optimizer, reason="as asked"),
        Decision(name="budget", value=gib(budget), reason="of the device's allocator"),
    ]
    if cp is not None:
        sharing = (
            f"{cp.dp_size} sequences at once, each over ring {cp.ring} x ulysses {cp.ulysses}, {cp.layout}"
        )
        decisions.append(Decision(name="ranks", value=sharing, reason=f"FSDP2 over all {cp.mesh.size()}"))
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
