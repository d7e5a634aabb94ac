"""The declared plans are those of the paper, and equal what is read back from plan.json."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gomuon.lab.experiments import catalogue, optimizers
from gomuon.lab.experiments.loss_windows import PAPER_WINDOWS
from gomuon.lab.experiments.plan import tuning_name
from gomuon.lab.running import execution


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


def test_no_two_questions_about_cost_share_a_seed() -> None:
    """What one campaign suggests is tried on the seeds of another."""
    seeds = {
        name.rpartition("-")[0]: set(plan.seeds)
        for name, plan in catalogue.OPEN_QUESTIONS.items()
        if name.startswith(("fast-", "preset-", "blocks-", "speed-", "state-"))
    }
    assert set(seeds) == {"fast", "preset", "blocks", "speed", "state"}
    assert sum(map(len, seeds.values())) == len(set.union(*seeds.values())) == 25


def test_nanogpt_gives_both_methods_the_same_rates_and_decay() -> None:
    plan = catalogue.find("nanogpt")
    assert len(plan.seeds) == 3
    for control, candidate in plan.comparisons:
        first, second = (next(a for a in plan.arms if a.name == n) for n in (control, candidate))
        assert first.lr == second.lr
        assert (first.optimizer, second.optimizer) == ("adamw", "go-muon")
        own = {"lr_scale": "adamw", "polar": "auto"}
        assert second.options == {**first.options, **own}


def test_defaults_are_tried_alike_on_four_tasks() -> None:
    plans = [plan for name, plan in catalogue.OPEN_QUESTIONS.items() if name.startswith("defaults")]
    assert len({plan.task for plan in plans}) == len(plans) == 4
    assert all(plan.arms == plans[0].arms and plan.seeds == plans[0].seeds for plan in plans)
    tried = {(a.lr, a.options["momentum"]) for a in plans[0].arms if a.name.startswith("m")}
    assert tried == {(rate, m) for rate in (0.02, 0.04, 0.08, 0.16) for m in (0.8, 0.95)}


def test_blocks_are_of_half_and_a_quarter_of_the_width() -> None:
    for name in ("blocks-ptb", "blocks-shakespeare"):
        plan = catalogue.find(name)
        width = plan.config(plan.arms[0], plan.seeds[0], 0.08).width
        sizes = [arm.options["block_size"] for arm in plan.arms]
        assert sizes == [None, width // 2, width // 4]
        assert plan.comparisons == (("whole", "half"), ("whole", "quarter"))
        assert plan.steps == catalogue.find("preset-ptb").steps == 400
        assert all(arm.options["polar"] == "fast" and arm.lr == 0.08 for arm in plan.arms)


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
