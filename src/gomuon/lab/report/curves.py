"""Curves for plots: smoothed, averaged over seeds, with no more points than a screen shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RAW_POINTS, SMOOTH_POINTS = 400, 300

Array = NDArray[np.float64]


def smooth(values: Array) -> Array:
    """A running mean over a fortieth of the run, shorter at both ends."""
    half = max(2, len(values) // 80)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    result: Array = (total[last] - total[first]) / (last - first)
    return result


def thin(values: Array) -> tuple[Array, Array]:
    """Updates and values of a smooth curve, at evenly spaced points."""
    keep = np.unique(np.linspace(0, len(values) - 1, SMOOTH_POINTS).astype(int))
    return (keep + 1).astype(np.float64), values[keep]


def thin_extremes(values: Array) -> tuple[Array, Array]:
    """Updates and values of a noisy curve: the smallest and the largest value of each block."""
    if len(values) <= RAW_POINTS:
        return np.arange(1, len(values) + 1, dtype=np.float64), values
    keep = []
    for block in np.array_split(np.arange(len(values)), RAW_POINTS // 2):
        part = values[block]
        keep += sorted({block[np.argmin(part)], block[np.argmax(part)]})
    return np.asarray(keep, dtype=np.float64) + 1, values[keep]


def thin_log(points: Sequence[tuple[int, float]]) -> tuple[Array, Array]:
    """Accuracies in per cent: the extremes of each block, evenly spaced on a log axis."""
    steps = np.asarray([step for step, _ in points], dtype=np.float64)
    values = 100 * np.asarray([value for _, value in points], dtype=np.float64)
    if len(steps) <= RAW_POINTS:
        return steps, values
    edges = np.geomspace(max(steps[0], 1), steps[-1] + 1, RAW_POINTS // 2 + 1)
    keep: set[int] = {0, len(steps) - 1}
    for low, high in zip(
        *(np.searchsorted(steps, e) for e in (edges[:-1], edges[1:])), strict=True
    ):
        if low < high:
            part = values[low:high]
            keep |= {int(low + np.argmin(part)), int(low + np.argmax(part))}
    index = sorted(keep)
    return steps[index], values[index]


def mean_over_seeds(series: Sequence[Array]) -> Array:
    """The mean over seeds, up to the length of the shortest."""
    length = min(len(one) for one in series)
    result: Array = np.mean([one[:length] for one in series], axis=0)
    return result
