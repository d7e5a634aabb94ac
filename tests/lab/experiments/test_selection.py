"""A selection.json is checked, and gives its rates to races and experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import catalogue, racing
from gomuon.lab.experiments.plan import Arm
from gomuon.lab.experiments.selection import FILE, read_selection
from gomuon.lab.results.runs import load_run
from gomuon.lab.running import execution
from tests.lab.helpers.commands import refused
from tests.lab.helpers.tiny_runs import addition_plan

MUON = {"rate": 0.05, "momentum": 0.9}


def selection_file(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "format": 1,
        "experiment": "tune",
        "task": "ptb",
        "seeds": [3, 4],
        "steps": 200,
        "settings": {"adamw_lr": 0.004, "width": 16},
        "methods": {"muon": MUON},
    }
    path = folder / FILE
    path.write_text(json.dumps(content | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiment": 3}, "is not a selection of gomuon tune or reproduce: its experiment is 3"),
        ({"format": 2}, "is not a selection of gomuon tune or reproduce: its format is 2"),
        ({"methods": {}}, "picks nothing"),
        ({"methods": []}, "is not a selection of gomuon tune"),
        ({"methods": {"muon": {"rate": 0.1}}}, "'momentum' is missing"),
        ({"methods": {"muon": {"rate": None, "momentum": None}}}, "every rate of muon diverged"),
        ({"methods": {"muon": {"rate": -1, "momentum": None}}}, "the rate of muon is -1"),
        ({"methods": {"muon": {"rate": 1, "momentum": 2}}}, "the momentum of muon is 2"),
        ({"methods": {"muon": {**MUON, "edge": "left"}}}, "the edge of muon is 'left'"),
        ({"methods": {"muon": {**MUON, "statistic": "low"}}}, "the statistic of muon is 'low'"),
        ({"methods": {"muon": {**MUON, "candidates": [{}]}}}, "'rate' is missing"),
        ({"methods": {"mun": {"rate": 1, "momentum": None}}}, "did you mean 'muon'"),
        ({"order": ["muon", "soap"]}, "['muon', 'soap'], does not match its methods"),
        ({"task": "pbt"}, "did you mean 'ptb'"),
        ({"settings": 3}, "is not a selection of gomuon tune"),
    ],
)
def test_a_file_that_is_no_selection_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = selection_file(tmp_path, **changes)
    for command in (["race"], ["reproduce", "ptb"]):
        assert words in refused([*command, "--selection", str(path)], capsys)


def test_a_method_whose_every_rate_diverged_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picked = {"rate": 0.05, "momentum": 0.9}
    nothing = {"rate": None, "momentum": None}
    path = selection_file(tmp_path, methods={"muon": picked, "soap": nothing, "adamw": picked})
    selection = read_selection(path)
    assert (list(selection.picked), selection.diverged) == (["muon", "adamw"], ("soap",))
    plan = racing.race_plan("ptb", ",".join(selection.picked), selection=selection)
    assert "not soap, of which every rate diverged there" in plan.rule
    plan = racing.race_plan("ptb", "muon,soap", rates="soap=0.001", selection=selection)
    assert [(arm.name, arm.lr) for arm in plan.arms] == [("muon", 0.05), ("soap", 0.001)]
    assert "diverged" not in plan.rule
    words = "every rate that the selection's sweep tried for soap diverged"
    command = ["race", "--selection", str(path), "--optimizers", "muon,soap"]
    assert words in refused(command, capsys)
    path = selection_file(tmp_path, methods={"go-muon": picked, "muon": nothing})
    words = "every rate that the selection's sweep tried for muon diverged"
    assert words in refused(["reproduce", "ptb", "--selection", str(path)], capsys)


@pytest.mark.parametrize("content", ["", "[]", '{"rule": "", "arms": {}}'])
def test_what_is_no_selection_at_all_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    assert "cannot read" in refused(["race", "--selection", str(path)], capsys)
    path.write_text(content)
    assert str(path) in refused(["race", "--selection", str(path)], capsys)


def test_a_race_takes_what_an_experiment_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema of `gomuon reproduce` is the one that `--selection` reads."""
    arms = (
        Arm("fixed", "Fixed", "muon", 0.05, grid=(0.05, 0.1)),
        Arm("tuned", "Tuned", "adamw", None, grid=(1e-6, 0.02)),
    )
    made = addition_plan(arms, seeds=(4,), tuning_seed=3, steps=20)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "made", made)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "made", "--threads", "1", "--out", "out"]) == 0
    selection = read_selection(tmp_path / "out" / FILE)
    assert list(selection.picked) == ["muon", "adamw"]
    assert selection.picked["muon"] == (0.05, None), "declared, so not the best of its grid"
    rate = load_run(tmp_path / "out" / "runs" / "tuned-s4").config.lr
    assert selection.picked["adamw"] == (rate, None)

    race = ["race", "--selection", "out/selection.json", "--steps", "2", "--threads", "1"]
    assert cli.main(race) == 0
    folder = tmp_path / "runs" / "race-grokking-tuned"
    run = load_run(folder / "runs" / "adamw-s4")  # the first seed after the tuning seed
    assert (run.config.lr, run.config.width, run.config.modulus) == (rate, 8, 5)
    rule = json.loads((folder / execution.PLAN).read_text())["rule"]
    assert "picked by gomuon reproduce made on grokking (seed 3, 20 updates)" in rule


def test_a_race_takes_the_selection_unless_told_otherwise(tmp_path: Path) -> None:
    selection = read_selection(selection_file(tmp_path))
    plan = racing.race_plan("ptb", "muon,soap", selection=selection)
    assert [(arm.lr, arm.options) for arm in plan.arms] == [
        (0.05, {"momentum": 0.9}),
        (0.003, {}),
    ]
    assert plan.seeds == (5, 6, 7, 8, 9)  # the rates were not picked on these
    assert (plan.settings["adamw_lr"], plan.settings["width"], plan.steps) == (0.004, 16, 1000)
    told = racing.race_plan(
        "ptb", "muon,go-muon-input", selection=selection, seeds="3", width=32, adamw_lr=0.1
    )
    assert (told.seeds, told.settings["width"], told.settings["adamw_lr"]) == ((3,), 32, 0.1)
    with pytest.raises(LabError, match="no rate for muon"):
        racing.race_plan("ptb", "muon", selection=selection, rates="muon=.1")


def test_an_experiment_takes_the_selection(tmp_path: Path) -> None:
    selection = read_selection(selection_file(tmp_path))
    ptb = catalogue.with_selection(catalogue.PTB, selection)
    assert [(arm.name, arm.lr, arm.options) for arm in ptb.arms] == [
        ("muon", 0.05, {"momentum": 0.9}),
        ("go-muon", 0.08, {}),
    ]
    assert ptb.comparisons == catalogue.PTB.comparisons
    assert "picked by gomuon tune on ptb (seeds 3 and 4, 200 updates)" in ptb.rule
    with pytest.raises(LabError, match="no rate for lazy"):
        catalogue.with_selection(catalogue.LAZY, selection)

    path = selection_file(tmp_path, task="shakespeare")
    shakespeare = catalogue.with_selection(catalogue.SHAKESPEARE, read_selection(path))
    assert {arm.name: (arm.lr, arm.grid) for arm in shakespeare.arms}["muon"] == (0.05, ())
    assert shakespeare.tuning_seed == 17401  # the other grids are still run

    both = {name: {"rate": 0.3, "momentum": None} for name in ("muon", "go-muon")}
    path = selection_file(tmp_path, task="grokking", methods=both)
    grokking = catalogue.with_selection(catalogue.GROKKING, read_selection(path))
    names = ["p103-muon", "p103-go-muon", "p107-muon", "p107-go-muon"]
    assert [arm.name for arm in grokking.arms] == names
    assert {arm.title for arm in grokking.arms} == {"Muon 0.3", "Go-MUON 0.3"}
    assert grokking.comparisons == (("p103-muon", "p103-go-muon"), ("p107-muon", "p107-go-muon"))
    assert grokking.paper is not None
    assert catalogue.GROKKING.paper is not None
    printed = catalogue.GROKKING.paper.grokking
    assert grokking.paper.grokking["p103-muon"] == printed["p103-muon-0.16"]
