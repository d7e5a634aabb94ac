"""Candidates are scored by the declared statistic, and the best is picked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.experiments import tuning
from gomuon.lab.experiments.plan import Arm, Plan, run_name
from gomuon.lab.experiments.selection import FILE, Candidate, read_selection
from gomuon.lab.report import writing
from gomuon.lab.results.candidates import Pick, picks_of, screen, write_selection
from gomuon.lab.results.runs import load_run
from gomuon.lab.running import execution
from gomuon.lab.running.execution import run_campaign
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import (
    SHAPE,
    Silent,
    addition_plan,
    corpus_on_disk,
)

ARMS = (Arm("slow", "Slow", "adamw", 0.001), Arm("fast", "Fast", "adamw", 0.05))


def test_the_grokking_screen_counts_a_run_that_never_groks_as_one_more(tmp_path: Path) -> None:
    run = run_campaign(addition_plan(ARMS), tmp_path, observer=Silent())[0]

    def outcome(optimizer: str, lr: float, step: int | None) -> Any:
        config = dataclasses.replace(run.config, optimizer=optimizer, lr=lr, steps=5000)
        return dataclasses.replace(run, config=config, result={"grok_step": step})

    muon, go = screen(
        [
            outcome("muon", 0.16, 2320),
            outcome("muon", 0.16, 4520),
            outcome("muon", 0.32, 2000),
            outcome("muon", 0.32, None),
            outcome("go-muon", 0.08, 290),
        ]
    )
    assert (muon.method, muon.rate) == ("muon", 0.16)
    assert {c.rate: c.score for c in muon.candidates} == {0.16: 6840, 0.32: 7001}
    assert (go.method, go.rate) == ("go-muon", 0.08)


MADE: dict[str, Any] = {**SHAPE, "length": 8, "batch": 2}


def pick(*scores: float | None, accuracy: tuple[float, ...] = ()) -> Pick:
    rates = [0.01 * 2**i for i in range(len(scores))]
    held = accuracy or (None,) * len(scores)
    made = zip(rates, scores, held, strict=True)
    return Pick("muon", tuple(Candidate(f"a{r}", "muon", r, None, s, a) for r, s, a in made))


@pytest.mark.parametrize(
    ("scores", "rate", "edge", "words"),
    [
        ((3.0, 2.0, 4.0), 0.02, None, None),
        ((1.0, 2.0, 4.0), 0.01, "lower", "0.01, is the lowest of its grid"),
        ((3.0, 2.0, 1.0), 0.04, "upper", "--rates muon=0.04/0.08/0.16"),
        ((3.0, 2.0, None), 0.02, None, None),
        ((None, None, None), None, None, "every rate diverged"),
        ((3.0,), 0.01, "only", "only rate tried"),
    ],
)
def test_the_edge_of_a_grid_is_said_loudly(
    scores: tuple[float | None, ...], rate: float | None, edge: str | None, words: str | None
) -> None:
    found = pick(*scores)
    assert (found.best.rate if found.best else None) == rate
    assert found.edge == edge
    warning = found.warning()
    assert (warning is None) == (words is None)
    if words is not None and warning is not None:
        assert words in warning


def test_ties_of_grok_steps_go_to_the_higher_accuracy() -> None:
    found = pick(61, 61, 61, accuracy=(0.2, 0.5, 0.3))
    assert found.best is not None
    assert found.best.rate == 0.02


def language(**changes: Any) -> Plan:
    facts: dict[str, Any] = {"rates": "adamw=1e-5/.02/1e20", "steps": 10, **MADE}
    return tuning.tune_plan("ptb", "adamw,muon", **facts | changes)


def test_the_lowest_loss_is_picked_and_never_a_diverged_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    plan = language(seeds="0,1")
    execution.declare(plan, tmp_path)
    runs = []
    for config in plan.main_configs({}):
        folder = tmp_path / execution.RUNS / run_name(config)
        train(config, folder, data_dir=data)
        runs.append(load_run(folder))
    adamw, muon = picks_of(plan, runs)
    scores = [c.score for c in adamw.candidates]
    assert scores[2] is None
    assert adamw.best is adamw.candidates[1]
    assert adamw.edge is None
    own = [run.result for run in runs if run.config.arm == "adamw-lr0.02" and run.result]
    assert scores[1] == pytest.approx(sum(r["geometric_mean"] for r in own) / 2)
    assert muon.best is min(muon.candidates, key=lambda c: c.score or 0)

    write_selection(tmp_path, plan, [adamw, muon])
    written = json.loads((tmp_path / FILE).read_text(), parse_constant=pytest.fail)
    assert written["methods"]["adamw"]["rate"] == 0.02
    assert [c["diverged"] for c in written["methods"]["adamw"]["candidates"]] == [0, 0, 1]
    assert written["windows"] == ["3-3", "6-6", "10-10"]
    assert read_selection(tmp_path / FILE).picked["adamw"] == (0.02, None)

    writing.write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## The sweep" in text
    assert text.index("| 0.02 | **") < text.index("| 1e+20 | diverged |")
    assert "AdamW 1e-05" not in text[: text.index("## Step times")]  # only picks are raced
