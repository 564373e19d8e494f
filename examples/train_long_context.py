"""Train a Qwen2, Qwen3 or Llama on long sequences of your own text, on one small card or several.

    python examples/train_long_context.py data.jsonl --model qwen2.5-0.5b --seq 32768 --steps 100 --out run
    python examples/train_long_context.py data.jsonl --model ./my-checkpoint --lora 16 --seq 131072 --out run
    torchrun --nproc-per-node 4 examples/train_long_context.py data.jsonl --model ./my-checkpoint --seq 524288 --out run

Under torchrun the cards share each sequence (--cp of them; all by default), and FSDP2 spreads parameters, gradients
and the optimizer's states over all.

data.jsonl: one JSON object a line with the document in "text". Documents are packed: joined by the separator token
and cut into sequences of --seq tokens, so a sequence may hold several, and attention sees all of them.

What fits is planned, not guessed: how much of the model is tiled, checkpointed and taken to the host is printed with
its reason, before the first step. The same command again continues from the last save, with the same losses. The
trained weights are in OUT/model at the end, as transformers (or peft) saves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import cp_volta
from probes.models import check_name, checkpoint, is_path
from probes.models.build import DTYPES, build, with_adapters

_TRIES = 20  # GradScaler halves its scale after each overflow; so many in a row is no matter of scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One training; see `main` for what each means."""

    data: Path
    out: Path
    model: str = "qwen2.5-0.5b"
    seq: int = 8192
    steps: int = 100
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    optimizer: Literal["adamw", "adamw8bit", "adamw_host"] = "adamw"
    lr: float = 1e-5
    clip: float = 1.0
    lora: int = 0
    cp: int = 0
    ulysses: int = 1
    budget_gib: float = 0.0
    save_every: int = 50
    seed: int = 0


class Stop(Exception):
    """Training cannot go on; the message says why and where to look."""


def train(options: Options, say: Any = print) -> list[float]:
    """Train to `options.steps` steps in all; the losses of this call's steps. Raises Stop, ValueError."""
    check_name(options.model)
    stream = packed(options)
    with ranks(options) as (device, cp):
        say = say if cp is None or dist.get_rank() == 0 else _silent
        torch.manual_seed(options.seed)
        ready = cp_volta.prepare(
            _model(options, device),
            seq=options.seq,
            dtype=DTYPES[options.dtype],
            optimizer=options.optimizer,
            lr=options.lr,
            budget_bytes=int(options.budget_gib * 2**30) or None,
            cp=cp,
        )
        say(ready.text())
        losses = _steps(options, ready, stream, say)
        _export(options, ready)
    return losses


@contextlib.contextmanager
def ranks(options: Options) -> Iterator[tuple[str, cp_volta.CpGroup | None]]:
    """The device of this process, and the ranks that torchrun started; None on one card. Raises ValueError."""
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" not in os.environ:
        if options.cp > 1 or options.ulysses > 1:
            raise ValueError("--cp and --ulysses are for several cards: start this with torchrun")
        yield "cuda" if cuda else "cpu", None
        return
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device, cp_volta.init_cp_group(options.cp or None, ulysses=options.ulysses)
    finally:
        dist.destroy_process_group()


def _steps(options: Options, ready: cp_volta.Prepared, stream: torch.Tensor, say: Any) -> list[float]:
    """From the last save, if there is one, to the last step. Ranks that share a sequence take the same one."""
    count, mine = (1, 0) if ready.cp is None else (ready.cp.dp_size, ready.cp.dp_rank)
    device = next(ready.model.parameters()).device
    begin = _resume(options, ready)
    losses, skipped = [], 0
    for step in range(begin, options.steps):
        ids = sequence(stream, step * count + mine, options.seq).to(device)
        try:
            loss, norm = _step(ready, ids, options.clip)
        except FloatingPointError as error:  # before the weights were touched: they can still be asked
            raise Stop(f"step {step}: {error}. {_culprit(ready, ids)}") from error
        skipped = 0 if math.isfinite(norm) else skipped + 1
        if skipped >= _TRIES:
            raise Stop(f"step {step}: gradients overflowed {skipped} times in a row. {_culprit(ready, ids)}")
        state = (
            f"gradients overflowed, step skipped, scale now {ready.scaler.get_scale():g}" if skipped else ""
        )
        say(f"step {step}  loss {loss:.6f}  gradient norm {norm:.4f}  {state}".rstrip())
        losses.append(loss)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            _save(options, ready, step + 1)
    return losses


def packed(options: Options) -> torch.Tensor:
    """All documents as one stream of token ids [N], int32. Raises ValueError naming the line that is wrong."""
    encode, separator = _tokenizer(options.model)
    ids: list[int] = []
    for number, line in enumerate(options.data.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{options.data}:{number}: expected {{"text": "…"}}, found {line[:60]!r}'
            ) from error
        ids += [*encode(text), separator]
    if len(ids) < options.seq:
        raise ValueError(f"{options.data}: {len(ids):,} tokens; one sequence takes {options.seq:,}")
    return torch.tensor(ids, dtype=torch.int32)


def sequence(stream: torch.Tensor, step: int, seq: int) -> torch.Tensor:
    """The ids [1, seq] of a step. Each pass over the stream begins a little later, so that cuts move."""
    per_pass = max(1, len(stream) // seq - 1)
    turn, place = divmod(step, per_pass)
    start = place * seq + (turn * 997) % max(1, len(stream) - per_pass * seq)
    return stream[start : start + seq].long()[None]


def _tokenizer(model: str) -> tuple[Any, int]:
    """(text -> ids, the separator). A preset has random weights and no vocabulary: bytes, and 10 between them."""
    if not is_path(model):
        return lambda text: list(text.encode()), 10
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(checkpoint(model), local_files_only=True)
    if words.eos_token_id is None:
        raise ValueError(f"{model}: its tokenizer has no end-of-sequence token to put between documents")
    return lambda text: words(text, add_special_tokens=False)["input_ids"], words.eos_token_id


def _model(options: Options, device: str) -> Any:
    """Parameters in float32, or, where only adapters are trained, in the compute dtype."""
    dtype = DTYPES[options.dtype] if options.lora else torch.float32
    model = build(options.model, device=device, dtype=dtype, seed=options.seed)
    return with_adapters(model, options.lora) if options.lora else model


def _step(ready: cp_volta.Prepared, ids: torch.Tensor, clip: float) -> tuple[float, float]:
    """One optimizer step; the loss, and the gradient norm before clipping (not finite: GradScaler skipped the step).

    Raises FloatingPointError, the weights as they were, for a loss that is no number, and without a GradScaler for
    such gradients.
    """
    assert ready.optimizer is not None
    ready.model.zero_grad(set_to_none=True)
    loss = ready.loss({"input_ids": ids, "labels": ids})
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}")
    ready.scaler.scale(loss).backward()
    ready.scaler.unscale_(ready.optimizer)
    norm = float(cp_volta.clip_grad_norm(ready.model, clip))
    if not math.isfinite(norm) and not ready.scaler.is_enabled():
        raise FloatingPointError(f"the gradient norm is {norm}")
    ready.scaler.step(ready.optimizer)
    ready.scaler.update()
    return value, norm


def _culprit(ready: cp_volta.Prepared, ids: torch.Tensor) -> str:
    """The first module that overflows, among this rank's tokens; each rank says its own."""

    def forward() -> None:
        ready.loss({"input_ids": ids, "labels": ids})

    found = cp_volta.first_nonfinite(ready.model, forward)
    where = "" if ready.cp is None else f"On rank {dist.get_rank()}: "
    if found:
        return f"{where}The first module that overflows is {found}"
    return f"{where}Every module's output is finite: it overflows in the loss or in backward"


def _save(options: Options, ready: cp_volta.Prepared, step: int) -> None:
    """Every rank its part, in a folder of the step's; `latest` names it once all are there. Whole or not at all."""
    assert ready.optimizer is not None
    folder, latest = options.out / f"state-{step}", options.out / "latest"
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "made_with": _made_with(options, ready),
        "model": ready.model.state_dict(),
        "optimizer": ready.optimizer.state_dict(),
        "scaler": ready.scaler.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, folder / f"{_rank(ready)}.pt")
    _wait(ready)
    if _rank(ready) == 0:
        (options.out / "latest.part").write_text(folder.name)
        (options.out / "latest.part").rename(latest)
        for old in options.out.glob("state-*"):
            if old != folder:
                shutil.rmtree(old)
    _wait(ready)


def _resume(options: Options, ready: cp_volta.Prepared) -> int:
    latest = options.out / "latest"
    if not latest.exists():
        return 0
    assert ready.optimizer is not None
    path = options.out / latest.read_text() / f"{_rank(ready)}.pt"
    if not path.exists():
        raise ValueError(f"{path} is missing: it was saved by fewer ranks. Choose another --out")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, now in _made_with(options, ready).items():
        if (then := state["made_with"][name]) != now:
            raise ValueError(f"{path}: was saved with {name} {then}; this is {now}. Choose another --out")
    ready.model.load_state_dict(state["model"])
    ready.optimizer.load_state_dict(state["optimizer"])
    ready.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


def _export(options: Options, ready: cp_volta.Prepared) -> None:
    """The trained weights, or adapters, whole, for from_pretrained."""
    whole = get_model_state_dict(
        ready.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if _rank(ready) == 0:
        ready.model.save_pretrained(options.out / "model", state_dict=whole)  # type: ignore[operator]
    _wait(ready)


def _rank(ready: cp_volta.Prepared) -> int:
    return 0 if ready.cp is None else dist.get_rank()


def _wait(ready: cp_volta.Prepared) -> None:
    if ready.cp is not None:
        dist.barrier()


def _silent(*_: object) -> None:
    """What ranks other than the first say."""


def _made_with(options: Options, ready: cp_volta.Prepared) -> dict[str, str | int]:
    """What a saved state fits to, and the same losses depend on."""
    shared, world = (1, 1) if ready.cp is None else (ready.cp.size, ready.cp.mesh.size())
    same = {"model": options.model, "seq": options.seq, "lora": options.lora, "optimizer": options.optimizer}
    return {**same, "cp": shared, "ranks": world}


def main(
    data: Annotated[Path, typer.Argument(help='JSON lines, the document in "text"')],
    out: Annotated[Path, typer.Option(help="Where the state is saved, and continued from")],
    model: Annotated[
        str, typer.Option(help="A preset (random weights) or a checkpoint folder")
    ] = "qwen2.5-0.5b",
    seq: Annotated[int, typer.Option(min=2, help="Tokens of a sequence")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Steps in all")] = 100,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32: to compute in")] = "fp16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw8bit, or adamw_host: states on the host")
    ] = "adamw",
    lr: float = 1e-5,
    clip: Annotated[float, typer.Option(help="Largest gradient norm")] = 1.0,
    lora: Annotated[int, typer.Option(min=0, help="Rank of LoRA adapters; 0: train all")] = 0,
    cp: Annotated[int, typer.Option(min=0, help="Cards that share a sequence; 0: all of torchrun's")] = 0,
    ulysses: Annotated[int, typer.Option(min=1, help="How many of them deal heads out; 1: a ring")] = 1,
    budget_gib: Annotated[float, typer.Option(help="Plan for so much memory; 0: what is free")] = 0.0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saves")] = 50,
    seed: int = 0,
) -> None:
    """Train a Qwen2, Qwen3 or Llama on long sequences of your own text, on one small card or several."""
    given = dict(locals())
    try:
        if dtype not in ("fp16", "bf16", "fp32"):
            raise ValueError(f"--dtype {dtype}: there are fp16, bf16, fp32")
        train(Options(**given))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    except Stop as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
