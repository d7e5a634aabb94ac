"""Step times compare whole cycles, and the estimate counts every run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.plan import Arm
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running import execution, timing, training
from gomuon.lab.running.execution import run_campaign
from tests.lab.helpers.tiny_runs import Silent, addition, addition_plan

ARMS = (Arm("slow", "Slow", "adamw", 0.001), Arm("fast", "Fast", "adamw", 0.05))


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
