"""A sweep gives every method the same budget, picks by its statistic, and can be raced with."""

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
from gomuon.lab.experiments import catalogue, optimizers, racing, tuning
from gomuon.lab.experiments.plan import Plan, run_name
from gomuon.lab.experiments.selection import FILE, read_selection
from gomuon.lab.report import writing
from gomuon.lab.results.candidates import Candidate, Pick, picks_of, write_selection
from gomuon.lab.results.runs import METRICS, load_run
from gomuon.lab.running import execution
from gomuon.lab.running.training import train
from tests.lab.helpers.made_campaigns import write_campaign
from tests.lab.helpers.tiny_runs import SHAPE, corpus_on_disk, forking
from tests.lab.test_cli import TINY, refused

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


def selection_file(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "format": 1,
        "experiment": "tune",
        "task": "ptb",
        "seeds": [3, 4],
        "steps": 200,
        "settings": {"adamw_lr": 0.004, "width": 16},
        "methods": {"muon": {"rate": 0.05, "momentum": 0.9}},
    }
    path = folder / FILE
    path.write_text(json.dumps(content | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiment": 3}, "is not a valid selection: its format must be 1"),
        ({"format": 2}, "is not a valid selection"),
        ({"methods": {}}, "picks nothing"),
        ({"methods": []}, "is not a valid selection"),
        ({"methods": {"muon": {"rate": 0.1}}}, "'momentum' is missing"),
        ({"methods": {"muon": {"rate": None, "momentum": None}}}, "every rate of muon diverged"),
        ({"methods": {"muon": {"rate": -1, "momentum": None}}}, "the rate of muon is -1"),
        ({"methods": {"muon": {"rate": 1, "momentum": 2}}}, "the momentum of muon is 2"),
        ({"methods": {"mun": {"rate": 1, "momentum": None}}}, "did you mean 'muon'"),
        ({"order": ["muon", "soap"]}, "['muon', 'soap'], does not match its methods"),
        ({"task": "pbt"}, "did you mean 'ptb'"),
        ({"settings": 3}, "is not a valid selection"),
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


def test_a_race_takes_the_selection_unless_told_otherwise(tmp_path: Path) -> None:
    selection = read_selection(selection_file(tmp_path))
    plan = racing.race_plan("ptb", "muon,soap", selection=selection)
    assert [(arm.lr, arm.options) for arm in plan.arms] == [
        (0.05, {"momentum": 0.9}),
        (0.003, {}),
    ]
    assert plan.seeds == (5,)  # a seed the rates were not picked on
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


@pytest.mark.parametrize("task", ["ptb", "grokking"])
def test_the_report_of_a_sweep_is_about_what_it_picked(task: str, tmp_path: Path) -> None:
    plan = tuning.tune_plan(task, "go-muon,muon", grid=3, momenta=".8,.95", steps=400)
    folder = write_campaign(tmp_path / "made", plan)
    writing.write_report(folder)
    text = (folder / "report.md").read_text()
    top = text[: text.index("## The sweep")]
    assert top.count("| 1. |") == top.count("| 2. |") == 1
    assert "| 3. |" not in top
    assert "picked on the same seed 0" in top
    assert text.count("| picked") == 2
    sweep = text[text.index("All candidates") : text.index("## ", text.index("All candidates"))]
    assert sweep.count("\n| 0.") == len(plan.arms) == 12
    assert optimizers.title("go-muon") in top


def test_an_unfinished_sweep_says_so(tmp_path: Path) -> None:
    plan = tuning.tune_plan("ptb", "go-muon,muon", grid=3, steps=40)
    folder = write_campaign(tmp_path / "made", plan)
    for path in folder.glob("runs/muon-*"):
        (path / "result.json").unlink()
    writing.write_report(folder)
    text = (folder / "report.md").read_text()
    assert "Picked so far" in text
    assert "Muon: nothing picked" in text
    for path in folder.glob("runs/go-muon-*"):
        (path / "result.json").unlink()
    writing.write_report(folder)
    assert "No run has finished yet" in (folder / "report.md").read_text()
