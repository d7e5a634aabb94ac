"""A campaign runs what its plan declares, once, whatever the number of jobs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import racing
from gomuon.lab.experiments.plan import Arm, Plan
from gomuon.lab.experiments.selection import read_selection
from gomuon.lab.results.runs import METRICS, RESULT, load_run
from gomuon.lab.running import execution, training
from gomuon.lab.running.execution import RUNS, run_campaign
from tests.lab.helpers.tiny_runs import ADDITION, Silent, addition_plan, corpus_on_disk

ARMS = (Arm("slow", "Slow", "adamw", 0.001), Arm("fast", "Fast", "adamw", 0.05))


def metrics_of(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob(f"{RUNS}/*/{METRICS}")}


def test_the_number_of_jobs_changes_nothing(tmp_path: Path) -> None:
    plan = addition_plan(ARMS, seeds=(0, 1))
    for jobs in (1, 3):
        runs = run_campaign(plan, tmp_path / str(jobs), jobs=jobs, observer=Silent())
        assert len(runs) == 4
        assert all(run.finished for run in runs)
    first, second = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "3")
    assert first == second
    assert sorted(first) == ["fast-s0", "fast-s1", "slow-s0", "slow-s1"]


def test_finished_runs_are_skipped_and_missing_ones_made(tmp_path: Path) -> None:
    plan = addition_plan(ARMS)
    observer = Silent()
    run_campaign(plan, tmp_path, observer=observer)
    assert (observer.skipped, sorted(observer.finished)) == ([], ["fast-s0", "slow-s0"])
    expected = metrics_of(tmp_path)
    (tmp_path / RUNS / "slow-s0" / RESULT).unlink()
    observer = Silent()
    run_campaign(plan, tmp_path, observer=observer)
    assert (observer.skipped, observer.finished) == (["fast-s0"], ["slow-s0"])
    assert metrics_of(tmp_path) == expected


def test_a_campaign_continued_by_other_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = addition_plan(ARMS[:1])
    execution.declare(plan, tmp_path)
    monkeypatch.setattr(machine, "source_commit", lambda: "first")
    calls = iter(range(99))
    config = plan.config(plan.arms[0], 0, 0.001)
    training.train(config, tmp_path / RUNS / "slow-s0", stop=lambda: next(calls) >= 4)
    monkeypatch.setattr(machine, "source_commit", lambda: "second")
    observer = Silent()
    # Forked, so that the worker sees the other commit too.
    (run,) = run_campaign(plan, tmp_path, observer=observer, method="fork")
    assert run.resumed[0].commit == "second"
    assert observer.notes == [
        "slow-s0: commit changed after update 4; manifest.json has the old and the new values"
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seeds": (0, 1)}, "seeds"),
        ({"steps": 13}, "steps"),
        ({"rule": "another"}, "rule"),
        ({"arms": (ARMS[0], dataclasses.replace(ARMS[1], lr=0.06))}, "arms"),
        ({"threads": 2}, "threads"),
    ],
)
def test_another_plan_in_the_same_folder_is_refused_by_field(
    change: dict[str, Any], field: str, tmp_path: Path
) -> None:
    execution.declare(addition_plan(ARMS), tmp_path)
    execution.declare(addition_plan(ARMS), tmp_path)
    before = (tmp_path / execution.PLAN).read_bytes()
    with pytest.raises(LabError, match=f"another plan; {field} there: ") as caught:
        execution.declare(dataclasses.replace(addition_plan(ARMS), **change), tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert (tmp_path / execution.PLAN).read_bytes() == before


def test_runs_without_a_plan_are_not_adopted(tmp_path: Path) -> None:
    (tmp_path / RUNS / "slow-s0").mkdir(parents=True)
    with pytest.raises(LabError, match=r"runs but no plan\.json"):
        execution.declare(addition_plan(ARMS), tmp_path)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (addition_plan((Arm("x", "X", "adamm", 0.1),)), "did you mean 'adamw'"),
        (addition_plan(ARMS, task="grocking"), "did you mean 'grokking'"),
        (addition_plan(ARMS, settings={**ADDITION, "width": 9}), r"width \(9\)"),
        (addition_plan(ARMS, settings={**ADDITION, "modulus": 0}), "modulus"),
        (addition_plan((Arm("x", "X", "adamw", 0.1, options={"colour": 1}),)), "invalid settings"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    plan: Plan, words: str, tmp_path: Path
) -> None:
    with pytest.raises(LabError, match=words):
        run_campaign(plan, tmp_path / "out", observer=Silent())
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_refused_stops_the_campaign_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refused only by its worker, as where something changed after the campaign was declared.
    monkeypatch.setattr(execution, "try_arms", lambda plan, data_dir: None)
    bad = Arm("bad", "Bad", "adamw", 0.1, options={"colour": 1})
    with pytest.raises(LabError, match="invalid settings of optimizer 'adamw'"):
        run_campaign(addition_plan((*ARMS, bad)), tmp_path, jobs=3, observer=Silent())
    fixed = addition_plan((*ARMS, dataclasses.replace(bad, options={})))
    with pytest.raises(LabError, match="arms there: "):
        run_campaign(fixed, tmp_path, observer=Silent())


def language_plan(**changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "task": "ptb",
        "windows": ((3, 3), (6, 6), (10, 10)),
        "steps": 10,
        "settings": {**ADDITION, "modulus": 0, "length": 8, "batch": 2},
    }
    return addition_plan(**{"arms": ARMS} | facts | changes)


def test_an_open_rate_is_selected_on_the_tuning_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    plan = language_plan(
        arms=(
            Arm("tuned", "Tuned", "adamw", None, grid=(1e-5, 0.02, 1e-4)),
            Arm("fixed", "Fixed", "muon", 0.01, grid=(0.001, 0.01, 0.1)),
        ),
        tuning_seed=9,
    )
    # Forked, so that the workers see the made corpus too.
    runs = run_campaign(
        plan, tmp_path / "out", jobs=2, observer=Silent(), data_dir=data, method="fork"
    )
    names = [f"{run.config.arm}-s{run.config.seed}" for run in runs]
    assert names[0] == "tuned-lr1e-05-s9"
    assert len(names) == 8
    assert names[-2:] == ["tuned-s0", "fixed-s0"]
    path = tmp_path / "out" / execution.SELECTION
    methods = json.loads(path.read_text())["methods"]
    best = min(methods["adamw"]["candidates"], key=lambda candidate: candidate["statistic"])
    assert methods["adamw"]["rate"] == best["rate"] == 0.02 == load_run(runs[-2].folder).config.lr
    assert methods["muon"]["rate"] == 0.01
    assert [methods[name]["selected"] for name in ("adamw", "muon")] == [True, False]
    # A race takes it as it takes a sweep's.
    selection = read_selection(path)
    assert selection.picked == {"adamw": (0.02, None), "muon": (0.01, None)}
    race = racing.race_plan("ptb", "muon,adamw", selection=selection)
    assert [arm.lr for arm in race.arms] == [0.01, 0.02]
    assert race.seeds == (10, 11, 12, 13, 14)  # five by default, none of them the tuning seed
    assert "picked by gomuon reproduce made on ptb (seed 9, 10 updates)" in race.rule


def test_one_optimizer_is_tuned_in_one_arm_only(tmp_path: Path) -> None:
    arms = tuple(Arm(name, name, "adamw", None, grid=(0.1, 0.2)) for name in ("a", "b"))
    with pytest.raises(LabError, match="tunes one optimizer in two arms"):
        run_campaign(addition_plan(arms, tuning_seed=9), tmp_path / "out", observer=Silent())
    assert not (tmp_path / "out").exists()


def test_the_command_is_recorded_once_and_not_compared(tmp_path: Path) -> None:
    plan = addition_plan(ARMS)
    for argv in (["race", "--jobs", "1"], ["race", "--jobs", "2"]):
        run_campaign(plan, tmp_path, observer=Silent(), argv=argv)
    recorded = json.loads((tmp_path / execution.PLAN).read_text())
    assert recorded == {**plan.declaration(), "argv": ["race", "--jobs", "1"]}


def test_a_diverged_rate_is_never_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    plan = language_plan(arms=(Arm("a", "A", "adamw", None, grid=(1e30, 0.01)),), tuning_seed=9)
    runs = run_campaign(plan, tmp_path / "out", observer=Silent(), data_dir=data, method="fork")
    assert runs[-1].config.lr == 0.01
