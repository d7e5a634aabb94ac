"""A sweep gives every method the same budget and writes a selection for races."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import tuning
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.experiments.selection import FILE, read_selection
from gomuon.lab.results.runs import METRICS, load_run
from gomuon.lab.running import execution
from tests.lab.helpers.commands import TINY, refused
from tests.lab.helpers.tiny_runs import SHAPE, forking

MADE: dict[str, Any] = {**SHAPE, "length": 8, "batch": 2}


def rates_of(plan: Plan, method: str) -> list[tuple[Any, float | None]]:
    return [(a.options.get("momentum"), a.lr) for a in plan.arms if a.optimizer == method]


def test_every_method_gets_the_same_budget() -> None:
    plan = tuning.tune_plan("ptb", "go-muon,muon,soap", grid=5, steps=200, seeds="0,1")
    for method, middle in (("go-muon", 0.08), ("muon", 0.02), ("soap", 0.003)):
        found = [rate for _, rate in rates_of(plan, method)]
        assert found == pytest.approx([middle * 2**k for k in (-2, -1, 0, 1, 2)])
    configs = plan.main_configs({})
    assert len(configs) == 30
    assert {(c.steps, c.adamw_lr, c.batch) for c in configs} == {(200, 0.003, 16)}
    assert plan.windows == ((41, 60), (101, 120), (181, 200))
    assert "5 rates per method, each 2 times the one before" in plan.rule
    assert (
        plan.declaration()
        == tuning.tune_plan(
            "ptb", "go-muon,muon,soap", grid=5, steps=200, seeds="0,1"
        ).declaration()
    )


def test_momenta_multiply_candidates_and_who_has_none_gets_as_many_rates() -> None:
    plan = tuning.tune_plan("ptb", "muon,soap,adamw", grid=2, momenta=".8,.95")
    assert rates_of(plan, "muon") == [(0.8, 0.01), (0.8, 0.02), (0.95, 0.01), (0.95, 0.02)]
    assert rates_of(plan, "soap") == [(None, r) for r in (0.0015, 0.002121, 0.003, 0.004243)]
    assert "4 candidates for muon; soap and adamw have no momentum and as many rates" in plan.rule
    assert len({arm.name for arm in plan.arms}) == len({arm.title for arm in plan.arms}) == 12
    given = "soap=1e-3/2e-3/4e-3/8e-3,muon=.01/.02"
    plan = tuning.tune_plan("ptb", "muon,soap", rates=given, momenta=".8,.95")
    assert [len(rates_of(plan, name)) for name in ("muon", "soap")] == [4, 4]
    with pytest.raises(LabError, match="soap: it has no momentum and needs 2 rates for each"):
        tuning.tune_plan("ptb", "muon,soap", rates="soap=1e-3/2e-3/4e-3", momenta=".8,.95")


def test_rates_can_be_given_and_the_rest_gets_as_many() -> None:
    plan = tuning.tune_plan("ptb", "muon,soap", rates="muon=.04/.01/.02", ratio=3)
    assert rates_of(plan, "muon") == [(None, 0.01), (None, 0.02), (None, 0.04)]
    assert [rate for _, rate in rates_of(plan, "soap")] == [0.001, 0.003, 0.009]
    assert "as given for muon" in plan.rule


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--optimizers go-mun", "unknown optimizer 'go-mun'; did you mean 'go-muon'?"),
        ("--optimizers ,", "--optimizers is empty"),
        ("--task pbt", "unknown task 'pbt'; did you mean 'ptb'?"),
        ("--grid 0", "--grid must be at least 1, not 0"),
        ("--grid -3", "--grid must be at least 1, not -3"),
        ("--ratio -2", "--ratio must be a number above 1, not -2"),
        ("--ratio 1", "--ratio must be a number above 1, not 1"),
        ("--ratio nan", "--ratio must be a number above 1, not nan"),
        ("--ratio 1.0000001", "does not give 5 different rates"),
        (
            "--ratio 1e200",
            "--ratio 1e+200 does not give 5 different rates above 0; use",
        ),
        ("--grid 5000", "--grid 5000 with --ratio 2 does not give 5000 different rates"),
        ("--rates muon=", "--rates muon= has no rates"),
        ("--rates muon=.1/x", "'x' is not a number"),
        ("--rates muon=.1/-1", "a rate must be positive, not -1"),
        ("--rates muon=.1/.1", "has one rate twice"),
        ("--rates soap=.1", "'soap', which is not among"),
        ("--rates muon=.1/.2,go-muon=.1", "but muon has 2 and go-muon has 1"),
        ("--rates muon=.1/.2 --grid 5", "but --grid has 5 and muon has 2"),
        ("--momenta 1.5", "--momenta must lie in [0, 1), not 1.5"),
        ("--momenta .9,.9", "--momenta has one value twice"),
        ("--momenta x", "'x' is not a number"),
        ("--momenta .9 --optimizers adamw", "none of adamw has a momentum"),
        ("--steps 0", "--steps must be at least 1, not 0"),
        ("--seeds -1", "--seeds"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, words: str, refused_without_a_trace: Callable[[str], str]
) -> None:
    assert words in refused_without_a_trace(f"tune {arguments}")


def language(**changes: Any) -> Plan:
    facts: dict[str, Any] = {"rates": "adamw=1e-5/.02/1e20", "steps": 10, **MADE}
    return tuning.tune_plan("ptb", "adamw,muon", **facts | changes)


SWEEP = ["tune", "--optimizers", "muon,adamw", "--grid", "2", "--jobs", "2", *TINY]
KILLED = [*SWEEP, "--steps", "70"]


def test_a_sweep_from_start_to_race(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    arguments = [*SWEEP, "--momenta", ".5,.8", "--steps", "20", "--out", "out"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.index("2 rates per method") < text.index("[0/8]")
    edges = text.count("picked, ")
    assert edges >= 1  # of Muon's two rates the best is always at an end; AdamW has four
    assert text.count("WARNING  ") == edges
    assert "race with these: gomuon race --selection out/selection.json" in text
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    assert "highest of its grid" in (tmp_path / "out" / "report.md").read_text() or (
        "lowest of its grid" in (tmp_path / "out" / "report.md").read_text()
    )
    selection = json.loads((tmp_path / "out" / FILE).read_text())
    assert list(selection["methods"]) == ["adamw", "muon"]
    assert list(read_selection(tmp_path / "out" / FILE).picked) == ["muon", "adamw"]  # as asked for
    muon = selection["methods"]["muon"]
    assert muon["momentum"] in (0.5, 0.8)
    assert len(muon["candidates"]) == 4
    assert selection["methods"]["adamw"]["momentum"] is None
    assert len(selection["methods"]["adamw"]["candidates"]) == 4

    race = ["race", "--selection", "out/selection.json", "--steps", "4", "--threads", "1"]
    assert cli.main(race) == 0
    run = load_run(tmp_path / "runs" / "race-grokking-tuned" / "runs" / "muon-s1")
    assert run.config.lr == muon["rate"]
    assert run.config.options == {"momentum": muon["momentum"]}
    assert (run.config.width, run.config.modulus, run.config.steps) == (8, 5, 4)
    plan = json.loads((tmp_path / "runs" / "race-grokking-tuned" / execution.PLAN).read_text())
    assert "picked by gomuon tune on grokking (seed 0, 20 updates)" in plan["rule"]
    assert str(tmp_path) not in json.dumps(plan)

    words = refused(["race", "--task", "ptb", "--selection", "out/selection.json"], capsys)
    assert "tuned on 'grokking', not on 'ptb'" in words
    words = refused([*race, "--optimizers", "soap", "--out", "x"], capsys)
    assert "no rate for soap" in words
    words = refused(["reproduce", "all", "--selection", "out/selection.json"], capsys)
    assert "tuned on 'grokking', not on 'ptb'" in words


def interrupted(folder: Path) -> None:
    """A sweep in a process group of its own, to be killed."""
    os.setsid()
    cli.main([*KILLED, "--out", str(folder)])


def test_a_killed_sweep_continues_to_the_same_selection(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main([*KILLED, "--out", str(whole)]) == 0
    process = forking().Process(target=interrupted, args=(killed,))
    process.start()
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in killed.glob(f"runs/*/{METRICS}")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.join(30)
    assert not (killed / FILE).exists()
    assert (killed / execution.PLAN).exists()
    assert cli.main([*KILLED, "--out", str(killed)]) == 0
    assert (killed / FILE).read_bytes() == (whole / FILE).read_bytes()
    before = {path.name: (path / METRICS).read_bytes() for path in whole.glob("runs/*")}
    assert before == {path.name: (path / METRICS).read_bytes() for path in killed.glob("runs/*")}
    assert len(before) == 4
