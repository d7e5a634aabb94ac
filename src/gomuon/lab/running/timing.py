"""How long updates take: arms side by side in one process, and an estimate before a campaign."""

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
from gomuon.lab.running.training import Diverged, Session

UNIT = "whole step (forward, backward, optimizer)"


# Arms whose common cycle would be longer are averaged over cycles of their own each.
LONGEST = 40


def time_interleaved(
    configs: Sequence[RunConfig],
    *,
    cycles: int,
    warmup: int = 8,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Step arms in turn in one process; their times cycle by cycle.

    A cycle is the shortest stretch in which every arm renews its geometry a whole number of times.
    Taking turns at single steps lets a machine's drift and its neighbours hit all arms alike.

    Args:
        configs: the arms.
        cycles: how many are measured.
        warmup: steps before those, which are not.
        data_dir: where the corpora are.
        say: told in words of every arm that diverges meanwhile; the others go on without it.

    Returns:
        The content of ``timing.json``: under "seconds", per arm, the mean step of every cycle. An
        arm that diverged is in none of its lists.
    """
    intervals = [optimizers.refresh_interval(c.optimizer, c.options) for c in configs]
    common = math.lcm(*intervals)
    periods = [common if common <= LONGEST else interval for interval in intervals]
    measured = cycles * min(common, LONGEST)
    if (short := max(periods)) > measured:
        raise LabError(f"{measured} timed steps hold no cycle of {short}; give more cycles")
    total = warmup + measured
    sessions = [
        Session(dataclasses.replace(c, steps=total, telemetry=False), data_dir) for c in configs
    ]
    steps: list[list[float]] = [[] for _ in configs]
    lost: set[int] = set()
    for step in range(1, total + 1):
        # Whoever goes first finds colder caches, so they take turns at that too.
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
    """Means over whole cycles, the last ones if they do not fill the stretch."""
    spare = len(seconds) % period
    return [
        math.fsum(seconds[begin : begin + period]) / period
        for begin in range(spare, len(seconds), period)
    ]


def seconds_per_update(
    config: RunConfig, data_dir: str | Path | None = None, updates: int = 4
) -> float:
    """The mean time of a few real updates after a first one, which pays for warming up.

    Of a run that diverges meanwhile, those it made count, the first one if there is no other.
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
            # The first one went as far as its gradients, which is most of an update.
            taken = taken or [time.perf_counter() - begun]
            break
        taken.append(time.perf_counter() - begun)
    counted = taken[1:] or taken
    return math.fsum(counted) / len(counted)


def estimate_seconds(plan: Plan, jobs: int, data_dir: str | Path | None = None) -> dict[str, float]:
    """Seconds per update of every arm, measured, and under "total" the campaign's seconds.

    Arms that differ only in their rate cost the same and are measured once.
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
    # Two jobs on the same cores do not quite halve the time, but threads are shared out by the
    # plan, so what was measured with those threads holds for each of them.
    # A job without a run of its own saves nothing.
    return {**costs, "total": total / min(jobs, every)}
