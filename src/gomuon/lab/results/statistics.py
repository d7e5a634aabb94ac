"""Statistics of a finished run and of two paired arms; plain numbers in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import special

from gomuon.lab.experiments.loss_windows import LossWindow, window_name, windows_for
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, is_held_out

GROK_THRESHOLD = 0.99
GROK_EVALUATIONS = 5


def window_means(losses: Sequence[float], windows: Sequence[LossWindow]) -> dict[str, float]:
    """Mean loss over each window; ``losses[0]`` belongs to update 1."""
    means = {}
    for first, last in windows:
        if not 1 <= first <= last <= len(losses):
            raise ValueError(f"window {first}-{last} lies outside {len(losses)} updates")
        means[window_name((first, last))] = math.fsum(losses[first - 1 : last]) / (last - first + 1)
    return means


def geometric_mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the geometric mean of no values is undefined")
    # A diverged run has losses that are not finite; the logarithm would raise an error.
    if any(math.isnan(value) or value < 0 for value in values):
        return math.nan
    if 0.0 in values:
        return 0.0
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class TimeRatio:
    """Step time of a candidate divided by that of a control.

    Attributes:
        mean: the geometric mean over cycles; the ratio of mean times if cycles do not match.
        spread: standard deviation of a cycle's ratio, as a factor; None if cycles do not match.
        cycles: their number.
    """

    mean: float
    spread: float | None
    cycles: int


def compare_times(control: Sequence[float], candidate: Sequence[float]) -> TimeRatio:
    """Compare times that were measured in turn, cycle by cycle."""
    if len(control) != len(candidate):
        mean = math.fsum(candidate) / len(candidate) / (math.fsum(control) / len(control))
        return TimeRatio(mean, None, min(len(control), len(candidate)))
    logs = [math.log(b / a) for a, b in zip(control, candidate, strict=True)]
    mean = math.fsum(logs) / len(logs)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1))
    return TimeRatio(math.exp(mean), math.exp(spread), len(logs))


@dataclass(frozen=True)
class Paired:
    """Candidate minus control for each seed; negative means that the candidate is better."""

    differences: tuple[float, ...]
    mean: float
    low: float  # ends of the confidence interval of the mean; NaN with a single pair
    high: float
    relative: float  # mean difference over the control's mean
    wins: int  # pairs in which the candidate is strictly lower
    confidence: float


def paired(
    control: Sequence[float], candidate: Sequence[float], confidence: float = 0.95
) -> Paired:
    """Compare two arms seed by seed, with a Student-t interval of the mean difference."""
    if len(control) != len(candidate) or not control:
        raise ValueError(f"cannot pair {len(control)} values with {len(candidate)}")
    count = len(control)
    differences = tuple(b - a for a, b in zip(control, candidate, strict=True))
    mean = math.fsum(differences) / count
    half = math.nan
    if count > 1:
        variance = math.fsum((d - mean) ** 2 for d in differences) / (count - 1)
        half = student_t_quantile(0.5 + confidence / 2, count - 1) * math.sqrt(variance / count)
    return Paired(
        differences=differences,
        mean=mean,
        low=mean - half,
        high=mean + half,
        relative=mean / (math.fsum(control) / count),
        wins=sum(d < 0 for d in differences),
        confidence=confidence,
    )


def student_t_quantile(probability: float, freedom: int) -> float:
    """The t with P(T ≤ t) = probability, for probability in [1/2, 1)."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"no quantile for probability {probability} and {freedom} degrees")
    return float(special.stdtrit(freedom, probability))


def first_reaching(
    points: Sequence[tuple[int, float]], threshold: float = GROK_THRESHOLD
) -> int | None:
    """The first step whose accuracy reaches the threshold."""
    return next((step for step, accuracy in points if accuracy >= threshold), None)


def grok_step(
    evaluations: Sequence[tuple[int, float]],
    threshold: float = GROK_THRESHOLD,
    consecutive: int = GROK_EVALUATIONS,
) -> int | None:
    """The first of five consecutive evaluations at or above the threshold (the paper's rule)."""
    streak: list[int] = []
    for step, accuracy in evaluations:
        streak = [*streak, step] if accuracy >= threshold else []
        if len(streak) == consecutive:
            return streak[0]
    return None


def retention_failures(
    evaluations: Sequence[tuple[int, float]],
    grokked: int | None,
    threshold: float = GROK_THRESHOLD,
) -> list[int]:
    """Evaluations after the grok step that are below the threshold again."""
    if grokked is None:
        return []
    return [step for step, accuracy in evaluations if step > grokked and accuracy < threshold]


def language_result(
    metrics: Sequence[Mapping[str, Any]], windows: Sequence[LossWindow]
) -> dict[str, Any]:
    """The result of a character-model run: window means and their geometric mean.

    If a run diverged before the end of a window, that mean and the geometric mean are None.
    """
    losses = [float(line["loss"]) for line in metrics]
    reached = [window for window in windows if window[1] <= len(losses)]
    means: dict[str, float | None] = {window_name(window): None for window in windows}
    means.update(window_means(losses, reached))
    complete = [mean for mean in means.values() if mean is not None]
    result = {
        "windows": means,
        "geometric_mean": geometric_mean(complete) if len(complete) == len(means) else None,
        "final_loss": losses[-1] if losses else None,
    }
    held_out = [line[VALIDATION_LOSS] for line in metrics if VALIDATION_LOSS in line]
    if held_out:
        result[VALIDATION_LOSS] = float(held_out[-1])
    return result


def loss_score(result: Mapping[str, Any]) -> float | None:
    """The number by which a language run is judged; None if it diverged.

    The loss on held-out text where there is one, otherwise the geometric mean of the windows.
    """
    mean: float | None = result["geometric_mean"]
    # Of a run that diverged, the last evaluation is no result.
    return mean if mean is None else result.get(VALIDATION_LOSS, mean)


def score_name(task: str) -> str:
    """The head of a column with that number."""
    if task == "regression":
        return "excess loss"  # the expected loss minus that of the optimum, both computed
    return "validation loss" if is_held_out(task) else "geometric mean"


def grokking_result(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a modular-addition run: when it fits, when it groks, later failures."""
    train = [(int(line["step"]), float(line["train_accuracy"])) for line in metrics]
    test = [
        (int(line["step"]), float(line["test_accuracy"]))
        for line in metrics
        if "test_accuracy" in line
    ]
    grokked, fitted = grok_step(test), first_reaching(train)
    return {
        "grok_step": grokked,
        "train_99_step": fitted,
        "delay": None if grokked is None or fitted is None else grokked - fitted,
        "retention_failures": retention_failures(test, grokked),
        "final_test_accuracy": test[-1][1] if test else None,
        "final_loss": float(metrics[-1]["loss"]) if metrics else None,
    }


def run_result(task: str, steps: int, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a run on a task; ``steps`` is its planned number of updates."""
    if task == "grokking":
        return grokking_result(metrics)
    return language_result(metrics, windows_for(steps))
