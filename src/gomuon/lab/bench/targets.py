"""The speed targets: ratios within one run, each with its largest allowed value."""

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
class Target:
    """`quantity` of `arm` divided by that of `other` on a workload must be at most `most`.

    `other` may be `UNIT`: forward and backward of the model without hooks. The workload may be
    `HOOKS`: the memory of a step without refresh, with hooks and without them.
    """

    number: int
    title: str
    workload: str
    quantity: Literal["step", "whole", "peak"]
    arm: str
    other: str
    most: float


def _four(workload: str, where: str) -> tuple[Target, Target]:
    return (
        Target(5, f"{where}: step, Go-MUON K=4 / Muon", workload, "step", "go-muon-4", "muon", 2.0),
        Target(
            5, f"{where}: step, Go-MUON K=16 / Muon", workload, "step", "go-muon-16", "muon", 1.3
        ),
    )


def _overhead(arm: str, title: str) -> Target:
    what = f"200 matrices 8×8: step, {title} / torch AdamW(foreach=True)"
    return Target(7, what, "overhead", "step", arm, REFERENCE, 8.0)


K4, K1, PLAIN = "go-muon-4", "go-muon-1", "plain-go-muon-1"
TARGETS = (
    Target(1, "paper: step, Go-MUON K=4 / torch Muon", "paper", "step", K4, "torch-muon", 0.10),
    Target(2, "paper: step of Go-MUON K=4 / forward+backward", "paper", "step", K4, UNIT, 0.50),
    Target(3, "paper: whole step, Go-MUON K=4 / K=1", "paper", "whole", K4, K1, 0.80),
    Target(
        3, "paper: whole step, Go-MUON K=1 / plain script K=1", "paper", "whole", K1, PLAIN, 0.60
    ),
    Target(
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
    Target(
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
    """The arms that the targets of a workload need."""
    targets = [target for target in TARGETS if target.workload == workload]
    return {arm for target in targets for arm in (target.arm, target.other)} - {UNIT} | {REFERENCE}


@dataclass(frozen=True)
class TargetResult:
    """A target and the measured ratio.

    Attributes:
        error: absolute standard error; None if unknown.
        lower_bound: the ratio if the arm computed polar factors, maps, roots and moments only; see
            `lower_bounds`.
    """

    target: Target
    ratio: float | None
    error: float | None
    verdict: Verdict
    lower_bound: float | None = None


def check(result: Mapping[str, Any]) -> list[TargetResult]:
    """Every target with its measured ratio and a verdict."""
    return [_check(target, result) for target in TARGETS]


def _check(target: Target, result: Mapping[str, Any]) -> TargetResult:
    found: tuple[float, float | None] | None
    if target.workload == HOOKS:
        hooks = result["memory"].get(HOOKS)
        found = None if hooks is None else (float(hooks["ratio"]), None)
    else:
        found = ratio(result, target.workload, target.quantity, target.arm, target.other)
    if found is None:
        return TargetResult(target, None, None, "not measured")
    verdict: Verdict = "pass" if found[0] <= target.most else "miss"
    # A quick run measures smaller models; the targets are not meant for them.
    return TargetResult(
        target,
        *found,
        verdict if result["size"] == "full" else "quick",
        _lower_bound(target, result),
    )


def _lower_bound(target: Target, result: Mapping[str, Any]) -> float | None:
    """Least time of both sides if both are ours; else over the measured time of the other."""
    work = result["workloads"].get(target.workload, {})
    passes = _mean(work.get("arms", {}), REFERENCE, "forward_backward")
    if "kernels" not in work or passes is None:
        return None

    def least(arm: str) -> float | None:
        found = lower_bounds.least(work["kernels"], arm, target.quantity, result["threads"])
        if found is None:
            return None
        return found + (passes[0] if target.quantity == "whole" else 0.0)

    one, two = least(target.arm), least(target.other)
    if two is None:
        measured = (
            passes if target.other == UNIT else _mean(work["arms"], target.other, target.quantity)
        )
        two = None if measured is None else measured[0]
    return None if one is None or two is None else one / two


def ratio(
    result: Mapping[str, Any], workload: str, quantity: str, arm: str, other: str
) -> tuple[float, float | None] | None:
    """Ratio of the means with its standard error; None if either was not measured."""
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
