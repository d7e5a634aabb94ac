"""Learning-rate schedules as lists: one multiplier of the peak rate per update."""

from __future__ import annotations

import math

WARMUP_STEPS = 50


def cosine(steps: int) -> list[float]:
    """A cosine from 1 at the first update to 0 at the last, without warm-up."""
    if steps == 1:
        return [1.0]
    return [0.5 * (1 + math.cos(math.pi * t / (steps - 1))) for t in range(steps)]


def warmup_then_cosine(steps: int, warmup: int, floor: float) -> list[float]:
    """A linear rise over the first updates, then a cosine down to `floor` at the last one."""
    falling = max(1, steps - warmup)
    return [
        (t + 1) / (warmup + 1)
        if t < warmup
        else floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (t - warmup) / falling))
        for t in range(steps)
    ]


def warmup_then_constant(steps: int, warmup: int = WARMUP_STEPS) -> list[float]:
    """A linear rise over the first updates, then constant."""
    return [min(1.0, (t + 1) / warmup) for t in range(steps)]
