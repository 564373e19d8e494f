"""transformers' Trainer over ranks that share sequences trains as it does on one device. Real processes over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, IntervalStrategy, Trainer, TrainingArguments

import cp_volta
from cp_volta.patch import is_patched
from probes.models.build import build
from probes.text import tokens
from tests.ranks import run_ranks
from tests.test_cp_attention import Mode
from tests.test_cp_training import ULYSSES, ZIGZAG, _full

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SEQ, ROWS = 32, 7


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of text with unequal numbers of labels that count."""

    def __init__(self, rows: int = ROWS) -> None:
        self.ids = tokens(rows, SEQ, "cpu")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        labels = self.ids[i].clone()
        labels[: 4 * i] = -100
        return {"input_ids": self.ids[i], "labels": labels}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter(list(Texts()))


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    eval_loss: float
    weights: dict[str, Tensor]


def _arguments(folder: str, batch: int, accumulate: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **more,
    )


def _as_torchrun(rank: int) -> None:
    """Where transformers reads who works together; the group itself is there already."""
    world = torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def _train(
    rank: int, mode: Mode | None, folder: str, batch: int, accumulate: int, tiled: bool, more: dict[str, Any]
) -> Found:
    """mode None: transformers' own Trainer."""
    _as_torchrun(rank)
    args = _arguments(f"{folder}/{rank}", batch, accumulate, **more)
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    if tiled:
        cp_volta.tile(model)
    dp = torch.distributed.get_world_size() // (
        mode.cp if mode else 1
    )  # several: accelerate fills last batches up
    how = {"model": model, "args": args, "train_dataset": Texts(), "eval_dataset": Texts(5 if dp == 1 else 8)}
    trainer = Trainer(**how) if mode is None else cp_volta.CpTrainer(cp=mode.group(), **how)
    trainer.train()
    logs = trainer.state.log_history
    weights = {name: _full(p.detach()) for name, p in trainer.model.named_parameters()}
    found = Found(
        [entry["loss"] for entry in logs if "loss" in entry],
        [entry["grad_norm"] for entry in logs if "grad_norm" in entry],
        trainer.evaluate()["eval_loss"],
        {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in weights.items()},
    )
    trainer.save_model()
    return found


def _same(found: Found, want: Found) -> None:
    assert found.losses == pytest.approx(want.losses, rel=1e-4)
    assert found.norms == pytest.approx(want.norms, rel=1e-3)
    assert found.eval_loss == pytest.approx(want.eval_loss, rel=1e-4)
    assert found.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("tiled", [False, True], ids=["stock", "tiled"])
@pytest.mark.parametrize(("mode", "world"), [(ZIGZAG, 2), (ULYSSES, 4)], ids=["cp2", "dp2 x cp2"])
def test_it_trains_and_evaluates_as_the_trainer_without_cp(
    mode: Mode, world: int, tiled: bool, tmp_path: Path
) -> None:
    """transformers 48167: eval_loss was cp times the true one. Seven rows fill no last step, five no batch."""
    want = run_ranks(_train, world // mode.cp, None, f"{tmp_path}/stock", 2, 2, False, {})[0]
    assert want.losses[-1] < want.losses[0] - 0.3
    for found in run_ranks(_train, world, mode, str(tmp_path), 2, 2, tiled, {}):
        _same(found, want)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert not saved.config._attn_implementation.startswith("cp_volta")
    torch.testing.assert_close(saved.model.norm.weight.detach(), found.weights["model.norm.weight"])


FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
}


def test_sharded_with_fsdp2_it_trains_alike(tmp_path: Path) -> None:
    (want,) = run_ranks(_train, 1, None, f"{tmp_path}/stock", 2, 2, False, {})
    for found in run_ranks(_train, 2, ZIGZAG, str(tmp_path), 2, 2, True, FSDP2):
        _same(found, want)


def test_on_one_rank_it_is_the_trainer_itself(tmp_path: Path) -> None:
    (want,) = run_ranks(_train, 1, None, f"{tmp_path}/stock", 2, 2, False, {})
    (found,) = run_ranks(_train, 1, Mode(1, 1, "contiguous"), str(tmp_path), 2, 2, False, {})
    assert found.losses == want.losses


def _refused(rank: int, folder: str) -> list[str]:
    _as_torchrun(rank)
    cp, said = ZIGZAG.group(), []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=".") as error:
            call()
        said.append(str(error.value))

    def trainer(model: Any, args: TrainingArguments, **how: Any) -> cp_volta.CpTrainer:
        return cp_volta.CpTrainer(model=model, args=args, cp=cp, train_dataset=Texts(), **how)

    args = _arguments(folder, 1, 1)
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    refused(lambda: trainer(model, args, compute_metrics=len))
    refused(lambda: trainer(model, args, compute_loss_func=len))
    refused(lambda: trainer(model, _arguments(folder, 1, 1, label_smoothing_factor=0.1)))
    refused(lambda: trainer(None, args))
    assert not is_patched(model)
    streaming = cp_volta.CpTrainer(model=model, args=args, cp=cp, train_dataset=Stream())
    assert is_patched(model)
    refused(streaming.train)
    return said


def test_what_shards_cannot_honour_is_refused_by_name(tmp_path: Path) -> None:
    names = ["compute_metrics", "compute_loss_func", "label_smoothing_factor", "model", "dispatch_batches"]
    for said in run_ranks(_refused, 2, str(tmp_path)):
        for name, message in zip(names, said, strict=True):
            assert name in message


def _streams(rank: int, folder: str) -> list[float]:
    _as_torchrun(rank)
    args = _arguments(folder, 2, 2, accelerator_config={"dispatch_batches": False})
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    trainer = cp_volta.CpTrainer(model=model, args=args, cp=ZIGZAG.group(), train_dataset=Stream())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_stream_read_by_every_rank_trains(tmp_path: Path) -> None:
    first, second = run_ranks(_streams, 2, str(tmp_path))
    assert first == second
    assert first[-1] < first[0]


def _resumes(rank: int, folder: str) -> list[list[float]]:
    """The losses of four steps, then of the last two again from the second one's checkpoint."""
    _as_torchrun(rank)
    found = []
    for resume in (None, f"{folder}/checkpoint-2"):
        args = _arguments(folder, 1, 2, save_steps=2)
        args.save_strategy = IntervalStrategy.STEPS
        model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
        trainer = cp_volta.CpTrainer(model=model, args=args, cp=ZIGZAG.group(), train_dataset=Texts())
        trainer.train(resume_from_checkpoint=resume)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_a_training_continues_from_its_checkpoint(tmp_path: Path) -> None:
    for whole, rest in run_ranks(_resumes, 2, str(tmp_path)):
        assert len(whole) == 4
        assert rest[-2:] == whole[-2:]


class Scaling:
    """A trainer in fp16, as far as the scaler goes: accelerate makes none without a GPU."""

    def __init__(self, model: Any, args: Any) -> None:
        self.accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))


class CpScaling(cp_volta.CpTrainerMixin, Scaling):
    pass


def _scaler(rank: int, folder: str) -> str:
    _as_torchrun(rank)
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    return type(CpScaling(model, _arguments(folder, 1, 1), cp=ZIGZAG.group()).accelerator.scaler).__name__


def test_its_scaler_is_one_that_all_ranks_agree_on(tmp_path: Path) -> None:
    assert run_ranks(_scaler, 2, str(tmp_path)) == ["_GroupScaler"] * 2
