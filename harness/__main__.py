"""Command line: plan, run, report, fit, verify, doctor.

Exit codes: 0 as expected; 1 a row that the suite does not expect; 2 wrong input; 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.console import Console
from rich.text import Text

from harness import devices
from harness import suite as suites
from harness.cells import Device
from harness.console import console
from harness.errors import HarnessError, unknown
from harness.suite import Suite

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = console()

SuiteName = Annotated[str, typer.Argument(help="A name in suites/ (single) or a path of a TOML file")]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; default: what this machine has")
]
Only = Annotated[list[str] | None, typer.Option("--only", help="axis=value[,value…]; may be repeated")]
Shard = Annotated[str, typer.Option("--shard", help="i/n: the i-th of n parts")]


@app.command()
def plan(
    suite: SuiteName,
    device: DeviceName = None,
    only: Only = None,
    shard: Shard = "",
    cells: Annotated[bool, typer.Option("--cells/--no-cells", help="List the cells")] = True,
) -> None:
    """Show the cells, the skips with their reasons, and a time estimate. Touches no device."""
    from harness.plan import show

    show(_suite(suite, device, only, shard), out, cells)


@app.command()
def run(
    suite: SuiteName,
    device: DeviceName = None,
    use: Annotated[str | None, typer.Option("--devices", help="GPUs by position: 0-7 or 0,2")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Verdict-only cells side by side on a CPU")] = 1,
    only: Only = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Keep an earlier run aside and start anew")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run crashed, timed-out and failed cells again")
    ] = False,
    shard: Shard = "",
    isolation: Annotated[
        str, typer.Option(help="forkserver, or spawn: a cold Python per cell")
    ] = "forkserver",
    launcher: Annotated[
        str, typer.Option(help='"torchrun --nnodes=2 …" starts the ranks of a cell; default: the cell itself')
    ] = "",
    folder: Annotated[Path | None, typer.Option("--out", help="The run's folder")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Render BENCH.md at the end")] = True,
    answer: Annotated[bool, typer.Option("--answers", help="End with one sentence per question")] = False,
) -> None:
    """Run a suite, one isolated process per cell, one row each; go on where an earlier run stopped."""
    from harness.session import Options, execute

    if isolation not in ("forkserver", "spawn"):
        raise unknown("isolation", isolation, ("forkserver", "spawn"), "--isolation")
    options = Options(
        out=folder,
        devices=use,
        jobs=jobs,
        isolation=isolation,
        fresh=fresh,
        retry=retry,
        shard=shard,
        launcher=launcher,
    )
    outcome = execute(_suite(suite, device, only, shard), options, out)
    counts = ", ".join(f"{n} {status}" for status, n in sorted(outcome.counts.items()))
    state = "interrupted: " if outcome.interrupted else ""
    out.print(
        f"{state}{sum(outcome.counts.values())}/{outcome.cells} rows in {outcome.folder} ({counts or 'none'})",
        markup=False,
        soft_wrap=True,
    )
    if outcome.unexpected:
        out.print(f"{outcome.unexpected} of them not as the suite expects", style="red")
    if report and outcome.counts:
        _render([outcome.folder], outcome.folder, "md")
    if answer and outcome.counts:
        answers([outcome.folder])
    raise typer.Exit(outcome.exit_code)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write; default: the first run")
    ] = None,
    fmt: Annotated[str, typer.Option("--format", help="md or html")] = "md",
) -> None:
    """Render BENCH.md and its plots from rows alone."""
    if fmt not in ("md", "html"):
        raise unknown("format", fmt, ("md", "html"), "--format")
    _render(runs, folder or runs[0], fmt)


@app.command()
def answers(runs: Annotated[list[Path], typer.Argument(help="Folders of runs")]) -> None:
    """One sentence per question: which kernel, which compile mode, which dtype, how long a sequence."""
    from reports.answers import answers as derive
    from reports.load import load_run

    for answer in derive([load_run(path) for path in runs]):
        out.print(Text.assemble((answer.question, "bold"), f" {answer.sentence}"), soft_wrap=True)
        for line in answer.reservations:
            out.print(Text(f"  but: {line}", "yellow"), soft_wrap=True)


@app.command(name="fit")
def fit_(
    model: Annotated[str, typer.Argument(help="A preset, or a checkpoint folder")],
    method: Annotated[list[str] | None, typer.Option(help="full, 8bit, host, lora; default: all")] = None,
    cards: Annotated[int, typer.Option(min=1, help="Cards that share one sequence")] = 1,
    card: Annotated[str, typer.Option(help='Its name, e.g. "Tesla V100-SXM2-32GB"; default: this one')] = "",
    budget_gib: Annotated[
        float | None, typer.Option("--budget", min=0, help="GiB of one card; default: what this one has")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option("--host", min=0, help="GiB of host memory; default: what is free here")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Plan this length instead of the longest")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the first that fits, on this card")] = False,
) -> None:
    """The longest sequence that trains here: memory, seconds, and the command. Predicted, unless verified."""
    from harness import fit
    from probes.fit import Means, answers, cell_of, check_model

    check_model(model)
    name, here_gib = fit.card_here()
    means = Means(
        model=model,
        cards=cards,
        card=card or name,
        budget_gib=fit.budget(budget_gib, here_gib),
        host_gib=fit.host_here_gib() if host_gib is None else host_gib,
        seq=seq,
    )
    found = answers(means, method or [])
    what = f"{means.cards} x {means.card or 'a card'} with {means.budget_gib:.1f} GiB, host {means.host_gib:.0f} GiB"
    fit.show(out, found, f"{model} on {what}. Full steps in fp16, batch 1. Predicted, not measured:")
    fitting = [made for _, made, _ in found if made is not None]
    if verify and fitting:
        from harness.probe import ask

        if not here_gib or cards > 1:
            raise HarnessError(
                "fit --verify: runs one cell on one card, and there is none here or several asked"
            )
        raise typer.Exit(
            ask("train-step", cell_of(fitting[0], means), "cuda", {"steps": 1, "warmup_steps": 1}).exit_code
        )
    raise typer.Exit(0 if fitting else 1)


@app.command()
def verify(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A claim's id; may be repeated. Default: all")
    ] = None,
    check: Annotated[bool, typer.Option("--run/--no-run", help="Check, or only render the pages")] = True,
) -> None:
    """Check what README, BENCH.md and the catalogue claim; render VERIFY.md and TORCH_COMPILE_VOLTA.md."""
    from harness.verify import verify as check_claims

    if only and not check:
        raise HarnessError("--only with --no-run: rendering takes all claims; give one of the two")
    raise typer.Exit(check_claims(only or [], out, run=check))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False) -> None:
    """What this machine can do, decision by decision, with reasons. Exit 1 when something is a problem."""
    import probes.doctor as examination

    raise typer.Exit(examination.main(out, as_json))


def _suite(name: str, device: str | None, only: list[str] | None, shard: str) -> Suite:
    from probes.table import table

    if device not in (None, "cpu", "cuda"):
        raise unknown("device", device, ("cpu", "cuda"), "--device")
    wanted = cast("Device | None", device)
    path = suites.find(name, wanted or devices.here())
    suite = suites.load(path, table(), wanted)
    if only:
        suite = suites.only(suite, only)
    return suites.shard(suite, shard) if shard else suite


def _render(runs: list[Path], folder: Path, fmt: Literal["md", "html"] | str) -> None:
    from reports.bench import render
    from reports.load import load_run

    for path in render([load_run(run) for run in runs], folder, cast("Literal['md', 'html']", fmt)):
        if path.suffix in (".md", ".html"):
            out.print(f"report: {path}", markup=False, soft_wrap=True)


def guarded(command: typer.Typer, name: str) -> int:
    """Run a command line; user errors are printed without a traceback. Returns the exit code."""
    try:
        command(prog_name=name)
    except HarnessError as error:
        Console(stderr=True, highlight=False).print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    except OSError as error:  # of the user's machine: a folder that is read-only, a disk that is full
        place = f"{error.filename}: " if error.filename else ""
        Console(stderr=True, highlight=False).print(
            f"{place}{error.strerror or error}", style="red", markup=False, soft_wrap=True
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(app, "python -m harness"))
