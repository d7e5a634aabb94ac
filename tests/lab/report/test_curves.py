"""Smoothing and thinning of curves hide nothing."""

from __future__ import annotations

import numpy as np
import pytest

from gomuon.lab.report import curves


def test_smoothing_is_a_plain_mean_of_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=500)
    smoothed = curves.smooth(values)
    half = 500 // 80
    for i in (0, 3, 250, 499):
        expected = values[max(0, i - half) : i + half + 1].mean()
        assert smoothed[i] == pytest.approx(expected, abs=1e-12)
    assert curves.smooth(np.full(7, 2.5)) == pytest.approx(np.full(7, 2.5))


def test_thinning_keeps_ends_and_extremes() -> None:
    values = np.random.default_rng(1).normal(size=5000)
    values[1234], values[4321] = 50.0, -50.0
    steps, kept = curves.thin_extremes(values)
    assert len(kept) <= curves.RAW_POINTS
    assert kept.max() == 50.0
    assert kept.min() == -50.0
    assert (np.diff(steps) > 0).all()
    assert (values[steps.astype(int) - 1] == kept).all()  # every point is a real one

    steps, kept = curves.thin(values)
    assert (steps[0], steps[-1]) == (1, 5000)
    assert (values[steps.astype(int) - 1] == kept).all()

    points = [(step, value) for step, value in enumerate(values.tolist(), start=1)]
    steps, kept = curves.thin_log(points)
    assert (steps[0], steps[-1]) == (1, 5000)
    assert kept.max() == 5000.0
    assert kept.min() == -5000.0
    assert len(kept) <= curves.RAW_POINTS + 2
