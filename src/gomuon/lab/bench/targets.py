"""What the benchmark is held to: ratios of the same run, each with the most it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gomuon.lab.bench import lower_bounds
from gomuon.lab.bench.arms import REFERENCE

UNIT = "forward+backward"
HOOKS = "hooks"
Verdict = Literal["pass", "miss", "quick", "not measured"]


@dataclass(frozen=True)
class Bar:
    """One line: `quantity` of `arm` over that of `other` on a workload, and what it may be.

    `other` may be `UNIT`, the passes of the model without hooks; the workload may be `HOOKS`, the
    memory of a reuse step with and without them.
    """

    number: int
    title: str
    workload: str
    quantity: Literal["step", "whole", "peak"]
    arm: str
    other: str
    most: float


def _four(workload: str, where: str) -> tuple[Bar, Bar]:
    return (
        Bar(5, f"{where}: step, Go-MUON K=4 / Muon", workload, "step", "go-muon-4", "muon", 2.0),
        Bar(5, f"{where}: step, Go-MUON K=16 / Muon", workload, "step", "go-muon-16", "muon", 1.3),
    )


def _overhead(arm: str, title: str) -> Bar:
    what = f"200 matrices 8×8: step, {title} / torch AdamW(foreach=True)"
    return Bar(7, what, "overhead", "step", arm, REFERENCE, 8.0)


K4, K1, PLAIN = "go-muon-4", "go-muon-1", "plain-go-muon-1"
BARS = (
    Bar(1, "paper: step, Go-MUON K=4 / torch Muon", "paper", "step", K4, "torch-muon", 0.10),
    Bar(2, "paper: step of Go-MUON K=4 / forward+backward", "paper", "step", K4, UNIT, 0.50),
    Bar(3, "paper: whole step, Go-MUON K=4 / K=1", "paper", "whole", K4, K1, 0.80),
    Bar(3, "paper: whole step, Go-MUON K=1 / plain script K=1", "paper", "whole", K1, PLAIN, 0.60),
    Bar(
        4,
        "paper: step, exact Muon / five batched float32 Newton–Schulz steps",
        "paper",
        "step",
        "muon",
        "newton-schulz",
        1.5,
    ),
    *_four("wide", "width 512, 4 layers"),
    *_four("mlp", "MLP of four 512×512"),
    Bar(
        6,
        "paper: peak memory of a reuse step with hooks / without",
        HOOKS,
        "peak",
        K4,
        "without",
        1.01,
    ),
    _overhead("muon", "Muon"),
    _overhead(K4, "Go-MUON K=4"),
)


def arms_of(workload: str) -> set[str]:
    """The arms whose ratios on a workload are held to something."""
    bars = [bar for bar in BARS if bar.workload == workload]
    return {arm for bar in bars for arm in (bar.arm, bar.other)} - {UNIT} | {REFERENCE}


@dataclass(frozen=True)
class Reading:
    """A bar with what was measured; `error` is absolute, None where it is not known.

    `floor` is the ratio if the arm did nothing but its polar factors, maps, roots and moments, see
    `floors`.
    """

    bar: Bar
    ratio: float | None
    error: float | None
    verdict: Verdict
    floor: float | None = None


def read(result: Mapping[str, Any]) -> list[Reading]:
    """Every bar with its measured ratio and its verdict."""
    return [_reading(bar, result) for bar in BARS]


def _reading(bar: Bar, result: Mapping[str, Any]) -> Reading:
    found: tuple[float, float | None] | None
    if bar.workload == HOOKS:
        hooks = result["memory"].get(HOOKS)
        found = None if hooks is None else (float(hooks["ratio"]), None)
    else:
        found = ratio(result, bar.workload, bar.quantity, bar.arm, bar.other)
    if found is None:
        return Reading(bar, None, None, "not measured")
    verdict: Verdict = "pass" if found[0] <= bar.most else "miss"
    # A shortened run measures smaller models, for which the bars were not set.
    return Reading(
        bar, *found, verdict if result["size"] == "full" else "quick", _floor(bar, result)
    )


def _floor(bar: Bar, result: Mapping[str, Any]) -> float | None:
    """Both sides at their least where both are ours; else over what was measured of the other."""
    work = result["workloads"].get(bar.workload, {})
    passes = _mean(work.get("arms", {}), REFERENCE, "forward_backward")
    if "kernels" not in work or passes is None:
        return None

    def least(arm: str) -> float | None:
        found = lower_bounds.least(work["kernels"], arm, bar.quantity, result["threads"])
        if found is None:
            return None
        return found + (passes[0] if bar.quantity == "whole" else 0.0)

    one, two = least(bar.arm), least(bar.other)
    if two is None:
        measured = passes if bar.other == UNIT else _mean(work["arms"], bar.other, bar.quantity)
        two = None if measured is None else measured[0]
    return None if one is None or two is None else one / two


def ratio(
    result: Mapping[str, Any], workload: str, quantity: str, arm: str, other: str
) -> tuple[float, float | None] | None:
    """Mean over mean with the standard error of the ratio; None if either was not measured."""
    arms = result["workloads"].get(workload, {}).get("arms", {})
    one = _mean(arms, arm, quantity)
    two = (
        _mean(arms, REFERENCE, "forward_backward")
        if other == UNIT
        else _mean(arms, other, quantity)
    )
    if one is None or two is None:
        return None
    value = one[0] / two[0]
    if one[1] is None or two[1] is None:
        return value, None
    return value, value * math.hypot(one[1], two[1])


def _mean(arms: Mapping[str, Any], arm: str, quantity: str) -> tuple[float, float | None] | None:
    entry = arms.get(arm)
    if entry is None or "failed" in entry:
        return None
    return entry[quantity]["value"], entry[quantity]["error"]
