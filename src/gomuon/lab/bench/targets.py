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
Verdict = Literal["pass", "miss", "quick", "no bfloat16 units", "not measured"]


@dataclass(frozen=True)
class Target:
    """`quantity` of `arm` divided by that of `other` on a workload must be at most `most`.

    `other` may be `UNIT`: forward and backward of the model without hooks. The workload may be
    `HOOKS`: the memory of a step without refresh, with hooks and without them. A target with
    `bfloat16` is for processors with bfloat16 units, because the other side multiplies in it.
    """

    number: int
    title: str
    workload: str
    quantity: Literal["step", "whole", "peak"]
    arm: str
    other: str
    most: float
    bfloat16: bool = False


YARDSTICK = "newton-schulz"
K4, PRESET = "go-muon-4", "go-muon-fast"


def _whole(
    number: int, where: str, what: str, workload: str, arm: str, most: float, other: str = YARDSTICK
) -> Target:
    over = {YARDSTICK: "five Newton–Schulz steps", REFERENCE: "torch AdamW"}.get(other, other)
    title = f"{where}: whole step, {what} / {over}"
    return Target(number, title, workload, "whole", arm, other, most)


def _preset(number: int, where: str, workload: str, most: float) -> Target:
    return _whole(number, where, "Go-MUON, preset fast", workload, PRESET, most)


def _overhead(arm: str, title: str) -> Target:
    what = f"200 matrices 8×8: step, {title} / torch AdamW(foreach=True)"
    return Target(9, what, "overhead", "step", arm, REFERENCE, 8.0)


TARGETS = (
    _preset(1, "paper", "paper", 1.18),
    _whole(2, "paper", "Go-MUON K=4, fast polar", "paper", "go-muon-4-fast", 1.30),
    _whole(3, "paper", "Muon, fast polar", "paper", "muon-fast", 1.02),
    Target(
        3,
        "paper: whole step, Muon, fast polar / torch Muon, with bfloat16 units",
        "paper",
        "whole",
        "muon-fast",
        "torch-muon",
        1.0,
        bfloat16=True,
    ),
    _preset(4, "GPT-2, width 256", "gpt2", 1.4),
    _preset(4, "width 512", "wide", 1.4),
    _preset(5, "convolutional net", "conv", 1.25),
    _whole(6, "ResNet-18", "Go-MUON K=4", "resnet", K4, 4.0, REFERENCE),
    _whole(7, "MLP of four 2048×2048", "Go-MUON K=4", "mlp-2048", K4, 1.4),
    Target(
        8,
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
    if target.bfloat16 and "bfloat16" not in result.get("vectors", ""):
        verdict = "no bfloat16 units"
    # A quick run measures smaller models; the targets are not meant for them.
    verdict = verdict if result["size"] == "full" else "quick"
    return TargetResult(target, *found, verdict, _lower_bound(target, result))


def _lower_bound(target: Target, result: Mapping[str, Any]) -> float | None:
    """Least time of both sides if both are ours; else over the measured time of the other."""
    work = result["workloads"].get(target.workload, {})
    passes = _mean(work.get("arms", {}), REFERENCE, "forward_backward")
    if passes is None:
        return None

    def least(arm: str) -> float | None:
        seconds = work.get("kernels", {}).get(arm)
        if seconds is None:
            return None
        interval = work["arms"][arm]["interval"]
        found = lower_bounds.least(seconds, target.quantity, interval, result["threads"])
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
