"""A small training cell and nothing else: what isolation costs shows best beside little work."""

from __future__ import annotations

from harness.cells import Task
from harness.rows import Result
from probes.train_step import TrainStepAxes
from probes.train_step.timing import Timed
from probes.train_step.timing import run as take_steps
from probes.train_step.training import Training


def run(axes: TrainStepAxes, task: Task) -> Result:
    """Build the model and take the steps; no profile, no numerical check."""
    timed = Timed()
    take_steps(Training(axes, task.device, task.seed).step, task.measure, task.device, timed)
    return Result(step_s=tuple(timed.step_s), loss=timed.losses())
