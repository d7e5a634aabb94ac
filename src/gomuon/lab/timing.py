"""How long updates take: arms side by side in one process, and an estimate before a campaign."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.plans import Plan
from gomuon.lab.runs import RunConfig
from gomuon.lab.statistics import geometric_mean
from gomuon.lab.training import Session

UNIT = "whole step (forward, backward, optimizer)"


def interleaved(
    control: RunConfig,
    candidate: RunConfig,
    *,
    cycles: int,
    warmup: int = 2,
    data_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Step two arms alternately in one process and compare their times cycle by cycle.

    A cycle is the shortest stretch in which both arms renew their geometry a whole number of
    times. Alternating single steps lets a machine's drift and its neighbours hit both arms alike.

    Returns:
        The content of ``timing.json``; ratios are candidate over control.
    """
    period = math.lcm(*(int(c.options.get("refresh_every", 1)) for c in (control, candidate)))
    steps = (warmup + cycles) * period
    configs = [dataclasses.replace(c, steps=steps, telemetry=False) for c in (control, candidate)]
    sessions = [Session(config, data_dir) for config in configs]
    totals: list[tuple[float, float]] = []
    for cycle in range(warmup + cycles):
        seconds = [0.0, 0.0]
        for step in range(cycle * period + 1, (cycle + 1) * period + 1):
            # Whoever goes first finds colder caches, so they take turns.
            for index in (0, 1) if step % 2 else (1, 0):
                seconds[index] += sessions[index].update(step)[1]
        totals.append((seconds[0] / period, seconds[1] / period))
    measured = totals[warmup:]
    ratios = [second / first for first, second in measured]
    logs = [math.log(ratio) for ratio in ratios]
    mean = math.fsum(logs) / len(logs)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1))
    return {
        "arms": [control.arm, candidate.arm],
        "ratios": ratios,
        "geometric_mean": geometric_mean(ratios),
        "spread": math.exp(spread),  # one standard deviation, as a factor
        "seconds": [[first for first, _ in measured], [second for _, second in measured]],
        "unit": UNIT,
        "period": period,
        "threads": control.threads,
    }


def seconds_per_update(
    config: RunConfig, data_dir: str | Path | None = None, updates: int = 4
) -> float:
    """The mean time of a few real updates after a first one, which pays for warming up."""
    if updates < 1:
        raise LabError(f"updates must be at least 1, not {updates}")
    session = Session(dataclasses.replace(config, steps=updates + 1), data_dir)
    session.update(1)
    begun = time.perf_counter()
    for step in range(2, updates + 2):
        session.update(step)
    return (time.perf_counter() - begun) / updates


def estimate(plan: Plan, jobs: int, data_dir: str | Path | None = None) -> dict[str, float]:
    """Seconds per update of every arm, measured, and under "total" the campaign's seconds.

    Arms that differ only in their rate cost the same and are measured once.
    """
    measured: dict[str, float] = {}
    costs: dict[str, float] = {}
    total = 0.0
    for arm in plan.arms:
        config = plan.config(arm, plan.seeds[0], arm.lr or arm.grid[0])
        kind = repr((config.optimizer, config.options, arm.settings))
        if kind not in measured:
            measured[kind] = seconds_per_update(config, data_dir)
        costs[arm.name] = measured[kind]
        runs = len(plan.seeds) + (len(arm.grid) if plan.tuning_seed is not None else 0)
        total += measured[kind] * plan.steps * runs
    # Two jobs on the same cores do not quite halve the time, but threads are shared out by the
    # plan, so what was measured with those threads holds for each of them.
    return {**costs, "total": total / jobs}
