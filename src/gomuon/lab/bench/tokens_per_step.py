"""Whole steps of the paper's model with more and more tokens per step.

The optimizer's step costs the same for any number of tokens, while forward and backward grow with
it. So its share falls, and only the moments that are captured in the backward pass grow as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gomuon.lab.bench.arms import REFERENCE, BenchArm
from gomuon.lab.bench.interleaving import Mean, Runner, interleave, mean_over_cycles
from gomuon.lab.bench.measurement import digits
from gomuon.lab.bench.runners import build_runners
from gomuon.lab.bench.workloads import SHAPES, WINDOW, Size, Workload, transformer

MODEL = "paper"
ARMS = (REFERENCE, "newton-schulz", "muon-fast", "go-muon-4", "go-muon-4-fast", "go-muon-fast")
SIZES: dict[Size, tuple[int, ...]] = {
    "full": (512, 2048, 8192, 16384),
    "quick": (64, 256, 1024),
    "tiny": (16, 64),
}
WARMUP = 1
ALLOWANCE = 20.0  # seconds


def workload(tokens: int, size: Size) -> Workload:
    """The paper's model; the batch has as many sequences as make up the tokens."""
    shape = SHAPES[MODEL][size]
    batch = tokens // shape["length"]
    return transformer(f"tokens-{tokens}", f"{tokens} tokens", {**shape, "batch": batch})


def measure(
    size: Size, arms: Sequence[BenchArm], cycles: int, tick: Callable[[str, int], None]
) -> dict[str, Any]:
    """Whole steps over forward and backward without hooks, for each arm and number of tokens."""
    sizes = SIZES[size]
    runners: dict[str, Runner] = {}
    failed: dict[str, str] = {}
    for tokens in sizes:
        built, unfit = build_runners(arms, workload(tokens, size))
        runners |= {f"{name}@{tokens}": runner for name, runner in built.items()}
        failed |= {f"{name}@{tokens}": why for name, why in unfit.items()}
    step_times, broken = interleave(
        runners, warmup=WARMUP, steps=WINDOW * cycles, allowance=ALLOWANCE, tick=tick
    )
    failed |= broken
    passes = {
        tokens: mean_over_cycles(
            [one.forward_backward for one in step_times[f"{REFERENCE}@{tokens}"]], 1
        )
        for tokens in sizes
    }
    found: dict[str, Any] = {}
    for arm in arms:
        keys = {tokens: f"{arm.name}@{tokens}" for tokens in sizes}
        if bad := [failed[key] for key in keys.values() if key in failed]:
            found[arm.name] = {"title": arm.title, "failed": bad[0]}
            continue
        wholes = {
            tokens: mean_over_cycles([one.whole for one in step_times[key]], runners[key].interval)
            for tokens, key in keys.items()
        }
        ratios = [_ratio(wholes[tokens], passes[tokens]) for tokens in sizes]
        found[arm.name] = {
            "title": arm.title,
            "whole": [value for value, _ in ratios],
            "error": [error for _, error in ratios],
        }
    return {"sizes": list(sizes), "arms": found}


def _ratio(one: Mean, other: Mean) -> tuple[float, float | None]:
    """Rounded, with its standard error; None if either is unknown."""
    value = one.value / other.value
    if one.error is None or other.error is None:
        return digits(value), None
    return digits(value), digits(value * math.hypot(one.error, other.error))
