"""The example trains, continues with the same losses, and says what is wrong with its input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.train_long_context import Options, Stop, packed, sequence, train


@pytest.fixture
def options(tmp_path: Path) -> Any:
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"Document {i}. The quick brown fox jumps. " * 5}) for i in range(20)]
    data.write_text("\n".join(lines) + "\n\n")

    def make(**more: Any) -> Options:
        given = {
            "data": data,
            "out": tmp_path / "run",
            "model": "tiny-qwen2-4h",
            "seq": 64,
            "steps": 4,
            "dtype": "bf16",
        }
        return Options(**{**given, **more})

    return make


def quiet(*_: object) -> None:
    pass


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_host"])
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(options: Any, optimizer: str) -> None:
    kind = {"optimizer": optimizer, "lr": 1e-3}
    whole = train(options(out=options().out.with_name("whole"), **kind), quiet)
    first = train(options(steps=2, **kind), quiet)
    rest = train(options(**kind), quiet)
    assert first + rest == whole
    assert whole[-1] < whole[0]


def test_adapters_alone_are_trained_with_lora(options: Any) -> None:
    losses = train(options(lora=4, steps=6, lr=1e-2), quiet)
    assert losses[-1] < losses[0]
    saved = torch.load(options().out / "state-6" / "0.pt", weights_only=True)
    assert any("lora_A" in name for name in saved["model"])
    assert all(len(s) for s in saved["optimizer"]["state"].values())


def test_another_length_or_model_is_not_continued(options: Any) -> None:
    train(options(steps=1), quiet)
    with pytest.raises(ValueError, match="was saved with seq 64; this is 32"):
        train(options(seq=32), quiet)


def test_documents_are_packed_with_a_separator_and_each_pass_cuts_elsewhere(options: Any) -> None:
    stream = packed(options())
    assert int((stream == 10).sum()) == 20
    per_pass = len(stream) // 64 - 1
    first, again = sequence(stream, 0, 64), sequence(stream, per_pass, 64)
    assert first.shape == again.shape == (1, 64)
    assert not torch.equal(first, again)


def test_wrong_input_names_its_line(options: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(ValueError, match=r'data.jsonl:2: expected \{"text"'):
        train(options(), quiet)
    (tmp_path / "data.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(ValueError, match="6 tokens; one sequence takes 64"):
        train(options(), quiet)
    with pytest.raises(ValueError, match="Did you mean 'tiny-qwen2-4h'"):
        train(options(model="tiny-qwen2-4"), quiet)


def test_a_loss_that_is_no_number_stops_and_names_the_module(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import examples.train_long_context as example

    real = example._model

    def broken(*arguments: Any) -> Any:
        model = real(*arguments)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
        return model

    monkeypatch.setattr(example, "_model", broken)
    with pytest.raises(Stop, match=r"step 0: the loss is nan. The first module .* model.layers.0.mlp"):
        train(options(), quiet)
    assert not (options().out / "latest").exists()


def test_the_trained_weights_are_there_for_from_pretrained(options: Any) -> None:
    train(options(steps=2, lr=1e-3), quiet)
    saved = torch.load(options().out / "state-2" / "0.pt", weights_only=True)["model"]
    model = AutoModelForCausalLM.from_pretrained(options().out / "model")
    assert not model.config._attn_implementation.startswith(("cp_volta", "tc_volta"))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[name]), name


# Several ranks, as a user starts them ------------------------------------------------------------------------------


def torchrun(options: Any, world: int, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    given = options(dtype="fp32", **more)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [
        "examples/train_long_context.py",
        str(given.data),
        f"--out={given.out}",
        f"--model={given.model}",
    ]
    command += [f"--seq={given.seq}", f"--steps={given.steps}", "--dtype=fp32", "--lr=1e-3", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240, check=False)


def losses(run: subprocess.CompletedProcess[str]) -> list[float]:
    assert run.returncode == 0, run.stderr
    return [float(found) for found in re.findall(r"loss ([0-9.]+)  gradient", run.stdout)]


@pytest.mark.parametrize("words", [(), ("--ulysses=2", "--optimizer=adamw_host")], ids=["ring", "ulysses"])
def test_ranks_that_share_a_sequence_have_the_losses_of_one_and_continue(
    options: Any, words: tuple[str, ...]
) -> None:
    alone = train(options(out=options().out.with_name("alone"), dtype="fp32", lr=1e-3), quiet)
    first, rest = torchrun(options, 2, *words, steps=2), torchrun(options, 2, *words)
    assert losses(first) + losses(rest) == pytest.approx(alone, rel=1e-5)
    assert "ranks: 1 sequences at once" in first.stdout
    weights = AutoModelForCausalLM.from_pretrained(options().out / "model").state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(options().out.with_name("alone") / "model").state_dict()
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-4)
    other = torchrun(options, 2, *words, "--cp=1", "--ulysses=1", steps=5)
    assert other.returncode
    assert "was saved with cp 2; this is 1. Choose another --out" in other.stderr


def test_cards_are_asked_for_with_torchrun(options: Any) -> None:
    with pytest.raises(ValueError, match="start this with torchrun"):
        train(options(cp=2), quiet)
