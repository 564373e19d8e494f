"""A suite is checked against its probe before anything runs; messages name place, nearest word, choices."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from harness import suite
from harness.cells import Axes, Device, Probe
from harness.errors import HarnessError
from tests.conftest import ROOT


class A(Axes, frozen=True, kw_only=True):
    compile: Literal["none", "layers", "model"] = "none"
    seq: int
    x: int = 0


def _skip(axes: Axes, device: Device) -> str:
    return "the probe refuses x=13" if getattr(axes, "x", 0) == 13 else ""


PROBE = Probe(name="p", question="q", axes=A, work="a:b", skip=_skip)
HEAD = 'schema = 1\ntitle = "t"\nprobe = "p"\ndevice = "cpu"\n'


def parse(text: str, head: str = HEAD) -> suite.Suite:
    return suite.parse(head + text, "suites/x.toml", {"p": PROBE})


WRONG = {
    '[axes]\ncompile = ["none", "laiers"]\nseq = [1]': (
        "suites/x.toml: axes.compile[1]: unknown value 'laiers'. Did you mean 'layers'?\n"
        "  allowed: none, layers, model"
    ),
    '[axes]\ncompil = ["none"]\nseq = [1]': "axes.compil[0]: unknown axis of probe 'p' 'compil'. Did you mean 'compile'?",
    '[axes]\nseq = ["a"]': "axes.seq[0]: 'a': expected `int`, got `str`",
    "[axes]\nseq = []": "axes.seq: is empty",
    "[axes]\nseq = [1, 1]": "axes: this cell exists already",
    "[measure]\nstep = 3\n[axes]\nseq = [1]": "measure: unknown key 'step'. Did you mean 'steps'?",
    "measure = { steps = 0 }\n[axes]\nseq = [1]": "measure: steps is 0; the least allowed is 1",
    "measure = { timeout_s = nan }\n[axes]\nseq = [1]": "measure: timeout_s is nan; the least allowed is 0.1",
    "measure = { timeout_s = inf }\n[axes]\nseq = [1]": "timeout_s is inf; the most allowed is 100,000,000",
    '[env]\nCUDA_VISIBLE_DEVICES = "1"\n[axes]\nseq = [1]': "env.CUDA_VISIBLE_DEVICES: is the harness's own",
    '[env]\nTRITON_CACHE_DIR = "/x"\n[axes]\nseq = [1]': "choose with measure.cache",
    '[env]\n"A=B" = "1"\n[axes]\nseq = [1]': "env: 'A=B' = '1' cannot be an environment variable",
    'measure = { cache = "cool" }\n[axes]\nseq = [1]': "measure.cache: unknown value 'cool'. Did you mean 'cold'?",
    "replicates = 0\n[axes]\nseq = [1]": "replicates is 0; the least allowed is 1",
    "tittle = 'x'\n[axes]\nseq = [1]": "suites/x.toml: unknown key 'tittle'. Did you mean 'title'?",
    "[axes]\nx = [1]": "missing required field `seq`",
    "[fixed]\nseq = 1\n[axes]\nseq = [1]": "seq stands in both `fixed` and `axes`",
    "": "no cells",
    "x = ": "not TOML",
    '[[skip]]\nwhen = { sec = 1 }\nreason = "r"\n[axes]\nseq = [1]': "skip[0].when.sec: unknown axis",
    '[[skip]]\nwhen = { compile = "layer" }\nreason = "r"\n[axes]\nseq = [1]': "Did you mean 'layers'?",
    '[[skip]]\nwhen = {}\nreason = "r"\n[axes]\nseq = [1]': "skip[0].when: is empty",
    '[[skip]]\nwhen = { seq = 1 }\nreason = " "\n[axes]\nseq = [1]': "skip[0].reason: is empty; say why",
    "[[skip]]\nwhen = { seq = 1 }\n[axes]\nseq = [1]": "skip[0]: object missing required field `reason`",
    '[[expect]]\nwhen = { seq = 1 }\nstatus = ["okk"]\n[axes]\nseq = [1]': "expect[0].status[0]: unknown value 'okk'",
    '[[expect]]\nwhen = { seq = 1 }\nstats = ["ok"]\n[axes]\nseq = [1]': "expect[0]: unknown key 'stats'",
    "[[include]]\nseq = 1\n[axes]\nseq = [1]": "include[0]: this cell exists already",
    '[baseline]\ncompile = "eager"\n[axes]\nseq = [1]': "baseline.compile: unknown value 'eager'",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_wrong_input_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(HarnessError) as error:
        parse(text)
    assert message in str(error.value)


def test_a_wrong_head_is_named() -> None:
    for old, new, message in (
        ('"p"', '"q"', "probe: unknown probe 'q'"),
        ("cpu", "gpu", "device: unknown value 'gpu'. Did you mean 'cpu'?"),
        ("schema = 1", "schema = 2", "schema is 2; this program reads schema 1"),
        ("schema = 1", "", "schema is None"),
    ):
        with pytest.raises(HarnessError, match="suites/x.toml") as error:
            parse("[axes]\nseq = [1]", HEAD.replace(old, new))
        assert message in str(error.value)


def test_product_include_skip_and_expect() -> None:
    parsed = parse(
        '[axes]\ncompile = ["none", "model"]\nseq = [1, 2]\n'
        '[[skip]]\nwhen = { compile = "model", seq = [2, 3] }\nreason = "too long"\n'
        '[[include]]\nseq = 9\nx = 13\n[[expect]]\nwhen = { seq = 1 }\nstatus = ["oom"]\n'
    )
    cells = [(c.axes["compile"], c.axes["seq"], c.skip, c.expect_status) for c in parsed.cells]
    assert cells == [
        ("none", 1, "", ("oom",)),
        ("none", 2, "", ("ok",)),
        ("model", 1, "", ("oom",)),
        ("model", 2, "too long", ("ok",)),
        ("none", 9, "the probe refuses x=13", ("ok",)),
    ]
    assert parsed.warnings == ()


def test_a_rule_that_matches_nothing_is_a_warning() -> None:
    parsed = parse('[axes]\nseq = [1]\n[[skip]]\nwhen = { seq = 2 }\nreason = "r"\n')
    assert parsed.warnings == ("suites/x.toml: skip[0] matches no cell",)


def test_replicates_interleave_with_other_cells() -> None:
    parsed = parse("replicates = 2\n[axes]\nseq = [1, 2]\n")
    assert [(c.axes["seq"], c.replicate) for c in parsed.cells] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert len({c.hash for c in parsed.cells}) == 2


def test_what_decides_the_measurement_decides_the_hash() -> None:
    base = parse("[axes]\nseq = [1]\n").cells[0].hash
    for other in ("seed = 1\n[axes]\nseq = [1]", "measure = { steps = 9 }\n[axes]\nseq = [1]"):
        assert parse(other).cells[0].hash != base
    assert parse("[axes]\nseq = [1]\n", HEAD.replace('"t"', '"u"')).cells[0].hash == base
    assert parse("measure = { timeout_s = 9.0, grace_s = 1.0 }\n[axes]\nseq = [1]").cells[0].hash == base


def test_only_and_shard_select_cells_and_refuse_unknown_words() -> None:
    parsed = parse('[axes]\ncompile = ["none", "model"]\nseq = [1, 2, 3]\n')
    assert [c.axes["seq"] for c in suite.only(parsed, ["compile=model", "seq=1,3"]).cells] == [1, 3]
    parts = [suite.shard(parsed, f"{i}/4").cells for i in (1, 2, 3, 4)]
    assert sorted(c.hash for part in parts for c in part) == sorted(c.hash for c in parsed.cells)
    for bad in ("compil=none", "compile=mode", "compile"):
        with pytest.raises(HarnessError, match="--only"):
            suite.only(parsed, [bad])
    for bad in ("0/4", "5/4", "x", "1/0"):
        with pytest.raises(HarnessError, match="--shard"):
            suite.shard(parsed, bad)


def test_every_committed_suite_parses_without_a_warning() -> None:
    from probes.table import table

    paths = sorted(suite.SUITES.glob("*.toml"))
    assert {p.name for p in paths} >= {"single.cpu.toml", "single.cuda.toml", "drill.toml"}
    for path in paths:
        assert suite.load(path, table()).warnings == (), path


def test_a_suite_of_100_000_cells_is_planned_within_two_seconds_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    axes = f"fault = ['none']\nn = {list(range(100_000))}\n"
    path.write_text(f'schema = 1\ntitle = "big"\nprobe = "fault-drill"\ndevice = "cpu"\n[axes]\n{axes}')
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "harness", "plan", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr[-500:]
    assert "100,000 cells to run" in done.stdout
    assert " torch" not in done.stderr
    print(f"planned in {seconds:.2f} s")  # the figure is in LOG.md; a shared machine must not fail the test
