"""Step times: arms measured in turn in one process, and an estimate before a campaign."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running.session import Diverged, Session

UNIT = "whole step (forward, backward, optimizer)"


# If the common cycle of all arms is longer, each arm is averaged over its own cycles.
LONGEST = 40


def time_interleaved(
    configs: Sequence[RunConfig],
    *,
    cycles: int,
    warmup: int = 8,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure the step times of arms in turn in one process, cycle by cycle.

    A cycle is the smallest number of steps in which every arm refreshes its geometry a whole number
    of times. Because arms alternate at every step, a slow moment of the machine affects all alike.

    Args:
        configs: the arms.
        cycles: number of measured cycles.
        warmup: steps before them.
        data_dir: where the corpora are.
        say: called with a message for every arm that diverges; the others continue.

    Returns:
        The content of ``timing.json``: "seconds" has the mean step times of every cycle, per arm.
        Arms that diverged are left out.
    """
    intervals = [optimizers.refresh_interval(c.optimizer, c.options) for c in configs]
    common = math.lcm(*intervals)
    periods = [common if common <= LONGEST else interval for interval in intervals]
    measured = cycles * min(common, LONGEST)
    if (short := max(periods)) > measured:
        raise LabError(f"{measured} timed steps are fewer than a cycle of {short}; use more cycles")
    total = warmup + measured
    sessions = [
        Session(dataclasses.replace(c, steps=total, telemetry=False), data_dir) for c in configs
    ]
    steps: list[list[float]] = [[] for _ in configs]
    lost: set[int] = set()
    for step in range(1, total + 1):
        # The first arm of a step has colder caches, so the order changes.
        first = step // 2 % len(sessions)
        order = [*range(first, len(sessions)), *range(first)]
        for index in order if step % 2 else reversed(order):
            if index in lost:
                continue
            try:
                steps[index].append(sessions[index].update(step)[1])
            except Diverged:
                lost.add(index)
                say(f"{configs[index].arm} is not timed: it diverged at update {step} of {total}")
    kept = [index for index in range(len(configs)) if index not in lost]
    return {
        "arms": [configs[index].arm for index in kept],
        "seconds": [_cycle_means(steps[index][warmup:], periods[index]) for index in kept],
        "periods": [periods[index] for index in kept],
        "unit": UNIT,
        "threads": configs[0].threads,
    }


def _cycle_means(seconds: Sequence[float], period: int) -> list[float]:
    """Means over the last whole cycles."""
    spare = len(seconds) % period
    return [
        math.fsum(seconds[begin : begin + period]) / period
        for begin in range(spare, len(seconds), period)
    ]


def seconds_per_update(
    config: RunConfig, data_dir: str | Path | None = None, updates: int = 4
) -> float:
    """The mean time of a few real updates after a first one, which is slower.

    If the run diverges, the updates before that count, or the first one if there are no others.
    """
    if updates < 1:
        raise LabError(f"updates must be at least 1, not {updates}")
    session = Session(dataclasses.replace(config, steps=updates + 1), data_dir)
    taken: list[float] = []
    for step in range(1, updates + 2):
        begun = time.perf_counter()
        try:
            session.update(step)
        except Diverged:
            # The first update got as far as its gradients, which is most of its time.
            taken = taken or [time.perf_counter() - begun]
            break
        taken.append(time.perf_counter() - begun)
    counted = taken[1:] or taken
    return math.fsum(counted) / len(counted)


def estimate_seconds(plan: Plan, jobs: int, data_dir: str | Path | None = None) -> dict[str, float]:
    """Measured seconds per update of every arm, and under "total" the seconds of the campaign.

    Arms that differ only in their rate take the same time and are measured once.
    """
    measured: dict[str, float] = {}
    costs: dict[str, float] = {}
    total, every = 0.0, 0
    for arm in plan.arms:
        config = plan.config(arm, plan.seeds[0], arm.lr or arm.grid[0])
        kind = repr((config.optimizer, config.options, arm.settings))
        if kind not in measured:
            measured[kind] = seconds_per_update(config, data_dir)
        costs[arm.name] = measured[kind]
        runs = len(plan.seeds) + (len(arm.grid) if plan.tuning_seed is not None else 0)
        total += measured[kind] * plan.steps * runs
        every += runs
    # The plan divides the threads among the jobs, so a time measured with these threads holds for
    # each job, though parallel jobs slow each other down a little. Jobs beyond the number of runs
    # save nothing.
    return {**costs, "total": total / min(jobs, every)}
