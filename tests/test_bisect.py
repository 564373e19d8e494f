"""Bisecting: a script that needs torch alone, the first stage that fails, and what ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from probes.bisect import work
from probes.bisect.script import write
from probes.bisect.work import STAGES, Answer, Stage, ask, ladder
from probes.compile_matrix import MatrixAxes
from probes.compile_matrix.cases import batches, case


def script(folder: Path, **axes: object) -> Path:
    chosen = MatrixAxes(seq=8, batch=1, **axes)  # type: ignore[arg-type]
    return write(
        folder,
        case(chosen, "cpu", 0),
        batches(chosen, 1, "cpu", 0)[0],
        title="a test",
        options={},
        dynamic=False,
        dtype=torch.float32,
        scale=1.0,
    )


def test_the_script_needs_torch_alone_and_says_right(tmp_path: Path) -> None:
    made = script(tmp_path, model="layer")
    text = made.read_text()
    for ours in ("probes", "harness", "tc_volta", "transformers"):
        assert f"import {ours}" not in text
        assert f"from {ours}" not in text
    env = {"TORCH_COMPILE_BACKEND": "aot_eager", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(made)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["aot_eager: right"]), done.stderr[-800:]


def test_a_wrong_gradient_in_the_script_is_exit_1_and_named(tmp_path: Path) -> None:
    made = script(tmp_path, model="mlp")
    wrong = made.read_text().replace("candidate = step(", "candidate = spoiled(")
    helper = (
        "def spoiled(call, tensors):\n"
        "    found = step(call, tensors)\n"
        "    name = next(n for n in found if 'down' in n and 'weight' in n)\n"
        "    found[name] = found[name] * 1.01\n"
        "    return found\n\n\n"
    )
    made.write_text(wrong.replace("def main():", helper + "def main():"))
    answer = ask(made, Stage(name="eager", backend="eager"), 60.0, tmp_path)
    assert answer.came_to == "wrong"
    assert "gradient of" in answer.said
    assert "down" in answer.said


def fake(folder: Path, body: str) -> Path:
    """A script that answers by the backend it is asked with, without torch."""
    path = folder / "repro.py"
    path.write_text(
        f"import os, signal, sys, time\nb = os.environ['TORCH_COMPILE_BACKEND']\n{body}\nprint(b + ': right')\n"
    )
    return path


@pytest.mark.parametrize(
    ("body", "came_to", "said"),
    [
        ("if b == 'inductor': print(b + ': w: error 1'); sys.exit(1)", "wrong", "w: error 1"),
        ("if b == 'inductor': raise RuntimeError('no such kernel')", "crashed", "no such kernel"),
        ("if b == 'inductor': os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("if b == 'inductor': print('AUTOTUNE', flush=True); time.sleep(60)", "hung", "AUTOTUNE"),
    ],
    ids=["wrong", "an error", "a signal", "no end"],
)
def test_the_first_stage_that_fails_is_named_with_its_last_words(
    body: str, came_to: str, said: str, tmp_path: Path
) -> None:
    answers = ladder(fake(tmp_path, body), MatrixAxes(model="mlp"), 3.0, tmp_path)
    assert [a.came_to for a in answers] == ["right", "right", "right", came_to]
    assert answers[-1].stage == "inductor"
    assert said in answers[-1].said


def test_a_mode_with_cudagraphs_is_asked_without_them_first(tmp_path: Path) -> None:
    body = "if b == 'inductor' and os.environ.get('REPRO_CUDAGRAPHS') != '0': print(b + ': off'); sys.exit(1)"
    answers = ladder(fake(tmp_path, body), MatrixAxes(mode="reduce-overhead"), 10.0, tmp_path)
    assert [a.stage for a in answers] == [s.name for s in STAGES]
    assert [a.came_to for a in answers][-2:] == ["right", "wrong"]


def test_several_graphs_are_refused_with_their_number() -> None:
    def broken(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        torch._dynamo.graph_break()
        return y, y.sum()

    with pytest.raises(ValueError, match="Dynamo makes 2 graphs"):
        write(
            Path("nowhere"),
            broken,
            [torch.ones(2, requires_grad=True)],
            title="",
            options={},
            dynamic=False,
            dtype=torch.float32,
            scale=1.0,
        )
    assert not Path("nowhere").exists()


def test_a_bisector_that_is_not_done_tells_what_it_found_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = "Disabling pre_grad_passes did not fix the issue.\nDisabling lowerings fixed the issue.\n"
    monkeypatch.setattr(work, "_run", lambda *_: (None, heard))
    assert work.torch_bisector(tmp_path / "repro.py", 5.0, tmp_path) == (
        "not done within 5 s; switching lowerings off is a cure"
    )
    heard += (
        "Bisection complete: BisectionResult(backend='inductor', subsystem='lowerings', bisect_number=7)\n"
    )
    monkeypatch.setattr(work, "_run", lambda *_: (0, heard))
    assert "bisect_number=7" in work.torch_bisector(tmp_path / "repro.py", 5.0, tmp_path)


def test_torchs_bisector_is_asked_only_where_it_can_look() -> None:
    def answer(stage: str, came_to: str) -> Answer:
        return Answer(stage=stage, came_to=came_to, said="")

    assert work._can_look(answer("inductor", "wrong"))
    assert not work._can_look(answer("inductor", "hung"))
    assert not work._can_look(answer("eager", "wrong"))
