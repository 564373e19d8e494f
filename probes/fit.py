"""How long a sequence trains, by method: `python -m harness fit`. Predicted from a model's numbers; no torch.

The prediction is cp_volta's; here a model's name becomes its shape, a card's name its rates, and the answer a
command that can be run as it stands.
"""

from __future__ import annotations

import json
from typing import cast

import msgspec

from cp_volta.fitting import METHODS, DoesNotFit, Fit, Method, fit
from cp_volta.step import Shape
from harness.errors import HarnessError, unknown
from probes.models import PRESETS, check_name, checkpoint, is_path
from probes.peaks import peak_flops_per_s

GIB = 1 << 30
_OPTIMIZER = {"full": "adamw", "8bit": "adamw8bit", "host": "adamw_host", "lora": "adamw"}
_LORA_RANK = 16


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to train with."""

    model: str
    cards: int
    card: str  # its name; "" where it is not known
    budget_gib: float  # of one card, its context included
    host_gib: float
    seq: int | None = None


def answers(means: Means, methods: list[str]) -> list[tuple[str, Fit | None, str]]:
    """(method, fit, text) for each method; None where it does not fit. Raises HarnessError for wrong words."""
    found = []
    for method in methods or list(METHODS):
        if method not in METHODS:
            raise unknown("method", method, METHODS, "--method")
        found.append((method, *_answer(means, cast(Method, method))))
    return found


def check_model(model: str) -> None:
    """Raise HarnessError unless `model` is a preset or a checkpoint folder."""
    try:
        check_name(model)
    except ValueError as error:
        raise HarnessError(f"fit: {error}") from error


def _answer(means: Means, method: Method) -> tuple[Fit | None, str]:
    try:
        made = fit(
            shape_of(means.model),
            method,
            cards=means.cards,
            budget_bytes=int(means.budget_gib * GIB),
            host_bytes=int(means.host_gib * GIB),
            kernel=kernel_of(means.card),
            flops_per_s=peak_flops_per_s(means.card, "fp16")[0],
            seq=means.seq,
        )
    except DoesNotFit as error:
        return None, str(error)
    except ValueError as error:
        raise HarnessError(f"fit: {error}") from error
    return made, _text(made, means)


def _text(made: Fit, means: Means) -> str:
    plan = made.plan
    took = f"about {made.step_s:,.0f} s a step" if made.step_s else "time unknown: no peak of this card"
    host = f", {plan.host_bytes / GIB:.1f} GiB pinned on the host" if plan.host_bytes else ""
    lines = [
        f"{made.seq:,} tokens, {made.mode}: {plan.peak.bytes / GIB:.1f} GiB a card by the allocator{host}, {took}",
        *(f"  {d.name}: {d.value} ({d.reason})" for d in plan.decisions),
        f"  run: {_command(made, means)}",
    ]
    return "\n".join(lines)


def _command(made: Fit, means: Means) -> str:
    lora = f" --lora {_LORA_RANK}" if made.method == "lora" else ""
    start = f"torchrun --standalone --nproc-per-node {made.cards}" if made.cards > 1 else "python"
    ranks = f" --ulysses {made.ulysses}" if made.ulysses > 1 else ""
    return (
        f"{start} examples/train_long_context.py data.jsonl --out run --model {means.model} --seq {made.seq} "
        f"--optimizer {_OPTIMIZER[made.method]}{lora}{ranks}"
    )


def cell_of(made: Fit, means: Means) -> list[str]:
    """The train-step cell that verifies this answer, as axis=value."""
    return [
        f"model={means.model}",
        f"seq={made.seq}",
        "tiling=plan",
        "attention=" + kernel_of(means.card),
        "dtype=fp16",
        "step=full",
        f"precision={'plain' if made.method == 'lora' else 'amp'}",  # adapters stand beside fp16 weights
        f"optimizer={_OPTIMIZER[made.method]}",
        f"lora={_LORA_RANK if made.method == 'lora' else 0}",
        f"budget_gib={means.budget_gib}",
    ]


def kernel_of(card: str) -> str:
    """The attention kernel that tc_volta would take there: flash from Ampere on, CUTLASS before and where unknown."""
    old = ("V100", "TITAN V", "T4", "RTX 2080", "TITAN RTX", "RTX 8000", "P100")
    return "efficient" if not card or any(name in card for name in old) else "flash"


def shape_of(model: str) -> Shape:
    """The numbers of a preset, or of a checkpoint folder's config.json. Raises HarnessError where one is missing."""
    names = ("hidden", "mlp", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied")
    if not is_path(model):
        return Shape(**{name: getattr(PRESETS[model], name) for name in names})
    path = checkpoint(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return Shape(
            hidden=config["hidden_size"],
            mlp=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"{path}: is no configuration of a causal model: {error!r}") from error
