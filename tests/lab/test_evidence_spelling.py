"""The command read off a plan makes that plan again."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import campaign_commands, cli
from gomuon.lab.evidence.spelling import command
from gomuon.lab.experiments import catalogue, racing, tuning
from gomuon.lab.experiments.plan import Plan, adapt
from gomuon.lab.experiments.selection import read_selection
from tests.lab.made_evidence import sweep


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """What commands would have run, in an empty folder."""
    found: list[Plan] = []
    monkeypatch.setattr(campaign_commands, "carry_out", lambda plan, *_: found.append(plan))
    monkeypatch.chdir(tmp_path)
    return found


def repeats(
    plan: Plan, planned: list[Plan], words: str, selection: dict[str, Any] | None = None
) -> None:
    spelled = command(plan.declaration(), selection)
    assert spelled == words
    program, *arguments = shlex.split(spelled)
    assert program == "gomuon"
    assert cli.main(arguments) == 0
    (again,) = planned
    assert again.declaration() == plan.declaration()


@pytest.mark.parametrize("name", [*catalogue.EXPERIMENTS, *catalogue.OPEN_QUESTIONS])
def test_experiments(name: str, planned: list[Plan]) -> None:
    repeats(adapt(catalogue.find(name), threads=2), planned, f"gomuon reproduce {name} --threads 2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": (4, 6)}, "gomuon reproduce ptb --seeds 4,6 --threads 1"),
        ({"seeds": (4, 5, 6), "steps": 1200}, "reproduce ptb --seeds 4-6 --steps 1200 --threads 1"),
        ({"quick": True}, "gomuon reproduce ptb --quick --threads 1"),
        ({"steps": 50}, "gomuon reproduce ptb --steps 50 --threads 1"),
    ],
)
def test_experiments_with_other_seeds_and_steps(
    changes: dict[str, Any], words: str, planned: list[Plan]
) -> None:
    plan = adapt(catalogue.find("ptb"), threads=1, **changes)
    repeats(plan, planned, words if words.startswith("gomuon") else f"gomuon {words}")


SWEEPS: list[tuple[str, str, dict[str, Any], str]] = [
    ("ptb", "go-muon,muon,adamw", {}, ""),
    ("ptb", "muon,soap", {"grid": 3, "ratio": 4.0, "steps": 200}, "--grid 3 --ratio 4"),
    ("ptb", "muon,soap,adamw", {"momenta": ".8,.95"}, "--momenta 0.8,0.95"),
    (
        "grokking",
        "go-muon,newton-muon,adamw",
        {"momenta": ".8,.95", "rates": "newton-muon=.02/.04/.08/.16/.32", "steps": 300},
        "--rates newton-muon=0.02/0.04/0.08/0.16/0.32 --momenta 0.8,0.95",
    ),
    ("ptb", "muon", {"adamw_lr": 0.01, "width": 64, "length": 32}, ""),
]


@pytest.mark.parametrize(("task", "names", "options", "words"), SWEEPS)
def test_sweeps(
    task: str, names: str, options: dict[str, Any], words: str, planned: list[Plan]
) -> None:
    plan = adapt(tuning.tune_plan(task, names, seeds="100", **options), threads=1)
    steps = f"--steps {plan.steps} " if "steps" in options else ""
    shape = "--adamw-lr 0.01 --width 64 --length 32 " if "width" in options else ""
    flags = f"{words} " if words else ""
    repeats(
        plan,
        planned,
        f"gomuon tune --task {task} --optimizers {names} {flags}--seeds 100 {steps}{shape}"
        "--threads 1",
    )


def test_races_without_a_sweep(planned: list[Plan]) -> None:
    plan = racing.race_plan("ptb", "go-muon,adamw", rates="adamw=.01", seeds="0-2", timing=True)
    repeats(
        adapt(plan, threads=1),
        planned,
        "gomuon race --task ptb --optimizers go-muon,adamw --lr adamw=0.01 --seeds 0-2 --timing "
        "--threads 1",
    )


def test_races_at_the_rates_of_a_sweep(planned: list[Plan], tmp_path: Path) -> None:
    sweep(tmp_path / "results", "grokking", steps=60, momenta=".8,.95")
    path = tmp_path / "results" / "tune-grokking" / "selection.json"
    plan = racing.race_plan(
        "grokking",
        "go-muon,muon,soap",
        rates="muon=.5",
        selection=read_selection(path),
        seeds="101-103",
        steps=600,
    )
    repeats(
        adapt(plan, threads=1),
        planned,
        "gomuon race --task grokking --optimizers go-muon,muon,soap --lr muon=0.5 --selection "
        "results/tune-grokking/selection.json --seeds 101-103 --steps 600 --threads 1",
        json.loads(path.read_text()),
    )


def test_an_experiment_at_the_rates_of_a_sweep(planned: list[Plan], tmp_path: Path) -> None:
    sweep(tmp_path / "results", "ptb", steps=100)
    path = tmp_path / "results" / "tune-ptb" / "selection.json"
    plan = catalogue.with_selection(catalogue.find("ptb"), read_selection(path))
    repeats(
        dataclasses.replace(plan, threads=1),
        planned,
        "gomuon reproduce ptb --selection results/tune-ptb/selection.json --threads 1",
    )
