"""Arms made ready to run, each with its own copy of a workload's model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gomuon.intervals import longest
from gomuon.lab.bench.arms import BenchArm, CannotTrain, Stepper
from gomuon.lab.bench.interleaving import Runner, reason
from gomuon.lab.bench.workloads import Workload

CLOCKS = ("statistics_every", "refresh_every")


def build_runners(
    arms: Iterable[BenchArm], workload: Workload
) -> tuple[dict[str, Runner], dict[str, str]]:
    """The arms that can train the model, and for each of the others the reason, by name."""
    runners: dict[str, Runner] = {}
    failed: dict[str, str] = {}
    for arm in arms:
        try:
            runners[arm.name] = build_runner(arm, workload)
        except CannotTrain as unfit:
            failed[arm.name] = str(unfit)
        except Exception as error:  # an error of another package must not end the benchmark
            failed[arm.name] = reason(error)
    return runners, failed


def build_runner(arm: BenchArm, workload: Workload) -> Runner:
    model = workload.make()
    stepper = arm.build(model)
    interval = refresh_interval(stepper) if arm.interval is None else arm.interval
    return Runner(model, stepper, workload, interval)


def refresh_interval(optimizer: Stepper) -> int:
    """Steps after which an optimizer of ours has renewed everything, by its settings."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return math.lcm(*(longest(group.get(clock)) for group in groups for clock in CLOCKS))
