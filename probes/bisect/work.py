"""Write the script, ask each stage, then torch's bisector; one sentence at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from harness.cells import Task
from harness.rows import Fact, Result
from probes.bisect.script import write
from probes.compile_matrix import CUDAGRAPH_MODES, MatrixAxes
from probes.compile_matrix.cases import batches, case
from probes.compile_matrix.compiled import options
from probes.models.build import DTYPES

_TAIL = 5
_SCALED = {"fp16": 1024.0}


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the script."""

    name: str
    backend: str
    env: dict[str, str] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the script said: "right", "wrong", "crashed" or "hung", and its last lines."""

    stage: str
    came_to: str
    said: str


STAGES = (
    Stage(name="eager", backend="eager"),
    Stage(name="aot_eager", backend="aot_eager"),
    Stage(name="aot_eager_decomp_partition", backend="aot_eager_decomp_partition"),
    Stage(name="inductor without cudagraphs", backend="inductor", env={"REPRO_CUDAGRAPHS": "0"}),
    Stage(name="inductor", backend="inductor"),
)


def run(axes: MatrixAxes, task: Task) -> Result:
    """The first stage that fails, as a sentence; the script stays in the run's folder."""
    folder = Path(task.log_path).parent.parent / "repro" / task.id
    module = case(axes, task.device, task.seed)
    words = " ".join(f"{k}={v}" for k, v in msgspec.to_builtins(axes).items())
    try:
        script = write(
            folder,
            module,
            batches(axes, 1, task.device, task.seed)[0],
            title=f"compile-matrix {words}",
            options=options(axes),
            dynamic=axes.dynamic,
            dtype=DTYPES[axes.dtype],
            scale=_SCALED.get(axes.dtype, 1.0),
        )
    except ValueError as error:
        return Result(status="unsupported", reason=f"no script: {error}")
    limit_s = max(10.0, task.measure.timeout_s / 15)
    answers = ladder(script, axes, limit_s, Path(task.folder))
    failing = next((a for a in answers if a.came_to != "right"), None)
    facts: dict[str, Fact] = {f"stage {a.stage}": f"{a.came_to}: {a.said}" for a in answers}
    facts["script"] = str(script)
    if failing is None:
        return Result(
            verdict="ok",
            verdict_reason=f"every stage is right in one step of the script alone ({script}): the failure needs more",
            facts=facts,
        )
    blamed = (
        torch_bisector(script, task.measure.timeout_s * 0.7, Path(task.folder)) if _can_look(failing) else ""
    )
    sentence = f"{failing.stage} is the first stage that is {failing.came_to}: {failing.said}"
    sentence += f"; torch's bisector: {blamed}" if blamed else ""
    return Result(
        verdict="mismatch", verdict_reason=f"{sentence}; {script}", facts=facts | {"bisector": blamed}
    )


def ladder(script: Path, axes: MatrixAxes, limit_s: float, scratch: Path) -> list[Answer]:
    """Each stage in turn, until one fails. Without cudagraphs in the mode the last two are one."""
    answers: list[Answer] = []
    for stage in STAGES:
        if stage.name == "inductor without cudagraphs" and axes.mode not in CUDAGRAPH_MODES:
            continue
        answers.append(ask(script, stage, limit_s, scratch))
        if answers[-1].came_to != "right":
            break
    return answers


def ask(script: Path, stage: Stage, limit_s: float, scratch: Path) -> Answer:
    """Run the script under the stage, in a process group of its own that is ended with it."""
    env = {"TORCH_COMPILE_BACKEND": stage.backend, **stage.env}
    code, text = _run([sys.executable, str(script)], env, limit_s, scratch)
    lines = [line for line in text.splitlines() if line.strip()]
    said = " / ".join(lines[-_TAIL:] if code not in (0, 1) else lines[-1:])[:600]
    if code is None:
        return Answer(stage=stage.name, came_to="hung", said=f"no end within {limit_s:g} s; {said}")
    crashed = code != 0 and not (code == 1 and lines and lines[-1].startswith(f"{stage.backend}: "))
    if crashed:
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return Answer(stage=stage.name, came_to="crashed", said=f"{how}; {said}")
    return Answer(stage=stage.name, came_to="wrong" if code else "right", said=said)


def _can_look(answer: Answer) -> bool:
    """The bisector switches parts of these two off, one after another; it would wait for a hang each time."""
    return answer.came_to != "hung" and answer.stage.startswith(("inductor", "aot_eager_decomp"))


def torch_bisector(script: Path, limit_s: float, scratch: Path) -> str:
    """What `torch._inductor.compiler_bisector run` says of the script, or why it says nothing."""
    command = ["-m", "torch._inductor.compiler_bisector", "run", sys.executable, str(script)]
    code, text = _run([sys.executable, *command], {}, limit_s, scratch)
    fixed = re.findall(r"Disabling (\S+) fixed the issue", text)
    if code is None:
        where = f"; switching {fixed[-1]} off is a cure" if fixed else ""
        return f"not done within {limit_s:g} s{where}"
    found = re.search(r"Bisection complete: (.*)", text)
    return found[1][:400] if found else f"no answer (exit {code}): {' / '.join(text.splitlines()[-2:])[:300]}"


def _run(command: list[str], env: dict[str, str], limit_s: float, scratch: Path) -> tuple[int | None, str]:
    """Exit code (None: it was ended at the limit) and all output. Caches are the cell's own."""
    log = scratch / "stage.log"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_COMPILE", "TORCH_BISECT"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**clean, **env, "PYTHONFAULTHANDLER": ""},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    print(text, flush=True)
    return code, text
