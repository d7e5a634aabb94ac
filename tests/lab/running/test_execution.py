"""A campaign runs what its plan declares, once, whatever the number of jobs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import catalogue, optimizers, racing
from gomuon.lab.experiments.loss_windows import PAPER_WINDOWS
from gomuon.lab.experiments.plan import Arm, Plan, Quick, adapt, tuning_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.experiments.selection import read_selection
from gomuon.lab.results.candidates import screen
from gomuon.lab.results.runs import METRICS, RESULT, load_run
from gomuon.lab.running import execution, timing, training
from gomuon.lab.running.execution import RUNS, run_campaign
from tests.lab.helpers.tiny_runs import ADDITION, Silent, addition, addition_plan, corpus_on_disk

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
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    plan: Plan, words: str, tmp_path: Path
) -> None:
    with pytest.raises(LabError, match=words):
        run_campaign(plan, tmp_path / "out", observer=Silent())
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_refused_stops_the_campaign_with_its_words(tmp_path: Path) -> None:
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
    assert [(arm.lr, race.seeds) for arm in race.arms] == [(0.01, (10,)), (0.02, (10,))]
    assert "picked by gomuon reproduce made on ptb (seed 9, 10 updates)" in race.rule


def test_a_diverged_rate_is_never_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    plan = language_plan(arms=(Arm("a", "A", "adamw", None, grid=(1e30, 0.01)),), tuning_seed=9)
    runs = run_campaign(plan, tmp_path / "out", observer=Silent(), data_dir=data, method="fork")
    assert runs[-1].config.lr == 0.01


def test_the_grokking_screen_counts_a_run_that_never_groks_as_one_more(tmp_path: Path) -> None:
    run = run_campaign(addition_plan(ARMS), tmp_path, observer=Silent())[0]

    def outcome(optimizer: str, lr: float, step: int | None) -> Any:
        config = dataclasses.replace(run.config, optimizer=optimizer, lr=lr, steps=5000)
        return dataclasses.replace(run, config=config, result={"grok_step": step})

    entries = screen(
        [
            outcome("muon", 0.16, 2320),
            outcome("muon", 0.16, 4520),
            outcome("muon", 0.32, 2000),
            outcome("muon", 0.32, None),
            outcome("go-muon", 0.08, 290),
        ]
    )
    assert entries["muon"]["rate"] == 0.16
    assert entries["muon"]["scores"] == {"0.16": 6840, "0.32": 7001}
    assert entries["go-muon"]["rate"] == 0.08


def test_interleaved_timing_compares_whole_refresh_cycles(tmp_path: Path) -> None:
    arms = tuple(
        Arm(f"k{k}", f"K={k}", "go-muon", 0.08, options={"refresh_every": k}) for k in (1, 4)
    )
    plan = addition_plan(arms, timing=("k1", "k4"))
    result = timing.time_interleaved(
        [plan.config(arm, 0, 0.08) for arm in arms], cycles=3, warmup=1
    )
    assert result["arms"] == ["k1", "k4"]
    assert result["periods"] == [4, 4]
    assert [len(seconds) for seconds in result["seconds"]] == [3, 3]
    assert all(taken > 0 for seconds in result["seconds"] for taken in seconds)

    run_campaign(plan, tmp_path, observer=Silent())
    written = (tmp_path / execution.TIMING).read_bytes()
    assert json.loads(written)["unit"] == "whole step (forward, backward, optimizer)"
    run_campaign(plan, tmp_path, observer=Silent())
    assert (tmp_path / execution.TIMING).read_bytes() == written


def test_arms_whose_cycles_seldom_meet_are_timed_over_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Timed:
        """Steps that take a second, or ten where the geometry is renewed."""

        def __init__(self, config: RunConfig, data_dir: object) -> None:
            self.every = optimizers.refresh_interval(config.optimizer, config.options)

        def update(self, step: int) -> tuple[dict[str, float], float]:
            return {}, 10.0 if (step - 1) % self.every == 0 else 1.0

    monkeypatch.setattr(timing, "Session", Timed)
    arms = [
        Arm(f"k{k}", f"K={k}", "go-muon", 0.08, options={"refresh_every": k}) for k in (1, 16, 25)
    ]
    plan = addition_plan((*arms, Arm("adamw", "AdamW", "adamw", 0.01)))
    configs = [plan.config(arm, 0, arm.lr or 0.0) for arm in plan.arms]
    result = timing.time_interleaved(configs, cycles=2)
    assert result["periods"] == [1, 16, 25, 1]
    assert [len(seconds) for seconds in result["seconds"]] == [80, 5, 3, 80]
    for seconds, k in zip(result["seconds"][1:3], (16, 25), strict=True):
        assert seconds == pytest.approx([(k + 9) / k] * len(seconds))
    long = Arm("k50", "K=50", "go-muon", 0.08, options={"refresh_every": 50})
    with pytest.raises(LabError, match="are fewer than a cycle of 50"):
        timing.time_interleaved([*configs, plan.config(long, 0, 0.08)], cycles=1)


def test_an_arm_that_diverges_is_not_timed_and_the_others_are(tmp_path: Path) -> None:
    wild = Arm("wild", "Wild", "muon", 1e30)
    plan = addition_plan((wild, *ARMS), timing=("wild", "slow", "fast"), label="quick")
    observer = Silent()
    runs = run_campaign(plan, tmp_path / "some", observer=observer)
    assert len(runs) == 3
    assert len(observer.notes) == 1
    assert re.fullmatch(r"wild is not timed: it diverged at update \d+ of \d+", observer.notes[0])
    found = json.loads((tmp_path / "some" / execution.TIMING).read_text())
    assert found["arms"] == ["slow", "fast"]
    assert len(found["seconds"]) == len(found["periods"]) == 2

    alone = addition_plan((wild,), timing=("wild",), label="quick")
    run_campaign(alone, tmp_path / "none", observer=observer)
    assert not (tmp_path / "none" / execution.TIMING).exists()


def test_a_run_that_diverges_is_estimated_by_the_updates_it_made() -> None:
    plan = addition_plan((Arm("wild", "Wild", "muon", 1e30), ARMS[0]))
    costs = timing.estimate_seconds(plan, jobs=1)
    assert all(0 < costs[name] < math.inf for name in ("wild", "slow", "total"))


@pytest.mark.parametrize(("diverges", "expected"), [(1, 3.0), (2, 1.0), (4, 2.5), (9, 3.5)])
def test_only_updates_before_a_divergence_count(
    diverges: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class Failing:
        """Update n takes n seconds; one of them is the last, after three."""

        def __init__(self, config: RunConfig, data_dir: object) -> None: ...

        def update(self, step: int) -> None:
            clock[0] += 3 if step == diverges else step
            if step == diverges:
                raise training.Diverged

    monkeypatch.setattr(timing, "Session", Failing)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.seconds_per_update(addition()) == expected


def test_an_estimate_counts_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "seconds_per_update", lambda config, data_dir: config.lr * 100)
    plan = addition_plan((ARMS[0], Arm("t", "T", "muon", None, grid=(0.5, 2.0))), tuning_seed=1)
    costs = timing.estimate_seconds(plan, jobs=2)
    # slow: one run at .1 s, t: one run and two for tuning at 50 s, twelve updates each.
    assert costs["total"] == pytest.approx((12 * 0.1 + 3 * 12 * 50) / 2)
    assert (
        timing.estimate_seconds(plan, jobs=64)["total"]
        == timing.estimate_seconds(plan, jobs=4)["total"]
    )


def test_quick_and_short_plans_are_labelled() -> None:
    plan = catalogue.PTB
    assert adapt(plan).label == "full"
    assert adapt(plan, seeds=(7,)).label == "full"
    assert adapt(plan, quick=True).label == "quick"
    short = adapt(plan, steps=500)
    assert short.label == "quick"
    assert short.windows == ((101, 150), (251, 300), (451, 500))
    assert all(config.label == "quick" for config in short.main_configs({}))
    with pytest.raises(LabError, match="--steps must be at least 1, not -5"):
        adapt(plan, steps=-5)


def test_the_declared_plans_are_the_papers() -> None:
    found = catalogue.EXPERIMENTS
    assert list(found) == ["ptb", "shakespeare", "grokking", "mapback", "lazy"]
    rates = {name: {arm.name: arm.lr for arm in plan.arms} for name, plan in found.items()}
    assert rates["ptb"] == {"muon": 0.02, "go-muon": 0.08}
    assert rates["shakespeare"] == {"muon-qk": 0.018, "muon": None, "go-muon": 0.08}
    assert found["shakespeare"].seeds == (17402, 17403, 17404)
    assert found["shakespeare"].tuning_seed == 17401
    grids = {arm.name: len(arm.grid) for arm in found["shakespeare"].arms}
    assert grids["muon"] == grids["go-muon"]
    assert rates["mapback"] == {"halfspace": 0.08, "go-muon": 0.08}
    assert len(found["mapback"].seeds) == len(found["lazy"].seeds) == 4
    assert [arm.options["refresh_every"] for arm in found["lazy"].arms] == [1, 4]
    assert found["lazy"].config(found["lazy"].arms[0], 0, 0.08).telemetry
    screens = {(a.optimizer, a.settings["modulus"], a.lr) for a in found["grokking"].arms}
    assert screens == {
        (name, p, lr)
        for p in (103, 107)
        for name, lrs in (("go-muon", (0.08, 0.16)), ("muon", (0.16, 0.32)))
        for lr in lrs
    }
    config = found["grokking"].config(found["grokking"].arms[0], 0, 0.16)
    assert (config.width, config.hidden, config.steps, config.evaluate_every) == (64, 192, 5000, 10)
    for name in ("ptb", "shakespeare", "mapback", "lazy"):
        assert found[name].windows == PAPER_WINDOWS
        config = found[name].config(found[name].arms[0], 0, 0.1)
        assert (config.width, config.layers, config.heads, config.hidden) == (128, 3, 4, 384)
        assert (config.length * config.batch, config.steps) == (2048, 1000)


def test_the_open_questions_change_one_thing_at_a_time() -> None:
    plan = catalogue.find("ablations")
    options = {arm.name: (arm.optimizer, arm.options) for arm in plan.arms}
    assert options["k4"] == ("go-muon", {})
    assert options["k1"][1] == {"refresh_every": 1}
    assert options["geometry-decay"][1] == {**options["plain-decay"][1], "geometry_decay": True}
    assert {arm.lr for arm in plan.arms} == {0.08}
    # Σ lr·wd of a cosine from .08 to 0, (1 + cos πt/T)/2 for T updates.
    rates = [0.04 * (1 + math.cos(math.pi * t / plan.steps)) for t in range(plan.steps)]
    assert math.fsum(rates) * catalogue.DECAY == pytest.approx(1.0, abs=2e-3)
    for name in catalogue.OPEN_QUESTIONS:
        plan = catalogue.find(name)
        arms = {arm.name: arm for arm in plan.arms}
        for control, candidate in plan.comparisons:
            assert arms[control].group == arms[candidate].group
        for arm in plan.arms:
            optimizers.find(arm.optimizer)
    rates_of_adamw = {arm.settings["adamw_lr"] for arm in catalogue.ADAMW_RATE.arms}
    assert rates_of_adamw == {1e-3, 3e-3, 1e-2}


@pytest.mark.parametrize("name", list(catalogue.EXPERIMENTS))
def test_a_plan_equals_its_own_declaration_read_back(name: str, tmp_path: Path) -> None:
    plan = catalogue.find(name)
    execution.declare(plan, tmp_path)
    execution.declare(plan, tmp_path)
    assert plan.paper is not None
    arms = {arm.name for arm in plan.arms}
    tuning = {tuning_name(arm, rate) for arm in plan.arms for rate in arm.grid}
    for figures in (plan.paper.windows, plan.paper.geometric_mean, plan.paper.grokking):
        assert set(figures) <= arms | tuning
    assert {name for pair in plan.comparisons for name in pair} <= arms


def test_the_papers_geometric_means_follow_from_its_windows() -> None:
    for plan in (catalogue.PTB, catalogue.SHAKESPEARE):
        assert plan.paper is not None
        for arm, windows in plan.paper.windows.items():
            mean = math.prod(windows.values()) ** (1 / 3)
            assert mean == pytest.approx(plan.paper.geometric_mean[arm], abs=2e-4), arm


def test_race_plans_take_what_is_typed() -> None:
    plan = racing.race_plan(
        "grokking", "go-muon, adamw", rates="adamw=.5", seeds="3-5,8", steps=7, modulus=11, width=8
    )
    assert [(arm.name, arm.lr) for arm in plan.arms] == [("go-muon", 0.08), ("adamw", 0.5)]
    assert plan.seeds == (3, 4, 5, 8)
    assert plan.comparisons == (("adamw", "go-muon"),)
    assert plan.timing == ()
    assert racing.race_plan("ptb", "muon,soap", timing=True).timing == ("muon", "soap")
    config = plan.config(plan.arms[0], 3, 0.08)
    assert (config.modulus, config.width, config.hidden, config.steps) == (11, 8, 192, 7)
    assert config.adamw_lr == 0.01
    assert racing.race_plan("ptb", "muon").config(plan.arms[0], 0, 0.02).adamw_lr == 0.003


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ""}, "--optimizers is empty"),
        ({"names": "muon,muon"}, "has a name twice"),
        ({"rates": "muon=x"}, "'x' is not a number"),
        ({"rates": "muon"}, "'' is not a number"),
        ({"rates": "muon=-1"}, "must be positive"),
        ({"rates": "soap=1"}, "'soap', which is not among"),
        ({"rates": "muon=.1,muon=.2"}, "--lr has muon twice: muon=.1,muon=.2"),
        ({"seeds": "a"}, "--seeds 'a' is not understood"),
        ({"seeds": "5-3"}, "not a range"),
        ({"seeds": "1,1"}, "has one seed twice"),
        ({"seeds": "-1"}, "is not understood"),
    ],
)
def test_what_a_race_cannot_read_is_named(arguments: dict[str, str], words: str) -> None:
    given = {"names": "muon,adamw"} | arguments
    with pytest.raises(LabError, match=words):
        racing.race_plan("grokking", given.pop("names"), **given)  # type: ignore[arg-type]


def test_quick_settings_reach_every_arm() -> None:
    plan = addition_plan(ARMS, quick=Quick(steps=4, seeds=1, settings={"width": 4}), seeds=(0, 1))
    quick = adapt(plan, quick=True)
    assert (quick.steps, quick.seeds) == (4, (0,))
    assert quick.config(quick.arms[0], 0, 0.1).width == 4
