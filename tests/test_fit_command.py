"""`python -m harness fit` answers from numbers alone, and refuses what it cannot answer."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import msgspec
import pytest

from examples import train_long_context
from harness.errors import HarnessError
from probes.fit import Means, answers, cell_of, kernel_of, shape_of
from probes.train_step import PROBE, TrainStepAxes
from tests.test_cli import harness

V100 = "Tesla V100-SXM2-32GB"
MEANS = Means(model="qwen2.5-1.5b", cards=1, card=V100, budget_gib=32.0, host_gib=100.0)


def test_every_method_is_answered_with_a_command_without_torch() -> None:
    done = harness("fit", "qwen2.5-1.5b", "--budget", "32", "--card", V100, "--host", "100")
    assert done.returncode == 0, done.stderr
    assert "Predicted, not measured" in done.stdout
    for method in ("full", "8bit", "host", "lora"):
        assert f"{method}: " in done.stdout
    assert "run: python examples/train_long_context.py data.jsonl --out run" in done.stdout


def test_more_memory_and_less_state_reach_further() -> None:
    def longest(method: str, **means: object) -> int:
        made = answers(msgspec.structs.replace(MEANS, **means), [method])[0][1]
        assert made is not None
        return made.seq

    assert longest("full", budget_gib=28.0) < longest("full") < longest("8bit") < longest("lora")
    assert longest("host", host_gib=20.0) < longest("host")


def test_what_does_not_fit_says_what_it_would_take() -> None:
    (_, made, text) = answers(msgspec.structs.replace(MEANS, budget_gib=8.0), ["full"])[0]
    assert made is None
    assert "do not fit" in text
    assert harness("fit", "qwen2.5-1.5b", "--budget", "8", "--method", "full").returncode == 1


def test_the_answer_is_a_cell_that_the_probe_accepts() -> None:
    for method, made, _ in answers(MEANS, []):
        assert made is not None
        given = dict(item.split("=") for item in cell_of(made, MEANS))
        axes = msgspec.convert(given, TrainStepAxes, strict=False)
        assert not PROBE.skip(axes, "cuda"), method
        assert axes.seq == made.seq


def test_a_checkpoint_folder_is_read_from_its_configuration(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert (shape.kv_heads, shape.head_dim, shape.tied) == (4, 16, False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HarnessError, match="is no configuration of a causal model"):
        shape_of(str(tmp_path))


def test_old_cards_get_the_kernel_that_they_have() -> None:
    assert [kernel_of(name) for name in (V100, "Tesla T4", "", "NVIDIA H200")] == [
        "efficient",
        "efficient",
        "efficient",
        "flash",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("qwen2.5-1.5",), "Did you mean 'qwen2.5-1.5b'?"),
        (("qwen2.5-1.5b",), "no card here to ask; give one card's memory: --budget 32"),
        (("qwen2.5-1.5b", "--budget", "32", "--method", "ful"), "Did you mean 'full'?"),
        (("qwen2.5-1.5b", "--budget", "32", "--seq", "1001", "--cards", "2"), "cannot be spread evenly"),
        (("qwen2.5-1.5b", "--budget", "32", "--verify"), "there is none here"),
    ],
)
def test_wrong_questions_are_one_message(arguments: tuple[str, ...], says: str) -> None:
    done = harness("fit", *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("cards", [1, 4])
def test_the_command_is_one_that_the_example_takes(cards: int) -> None:
    taken = {name.replace("_", "-") for name in inspect.signature(train_long_context.main).parameters}
    for _, made, text in answers(msgspec.structs.replace(MEANS, cards=cards), ["full", "host", "lora"]):
        assert made is not None
        command = text.split("run: ")[1].split("examples/train_long_context.py ")[1]
        words = set(re.findall(r"--([a-z-]+)", command))
        assert {"out", "model", "seq", "optimizer"} <= words <= taken
