"""Exponents of a power law."""

from __future__ import annotations

import pytest

from gomuon.lab.bench.growth import power_law


def test_exponents_are_those_of_a_power_law() -> None:
    slope, error = power_law({size: 7.0 * size**2.5 for size in (128, 256, 512, 1024)})
    assert slope == pytest.approx(2.5)
    assert error == pytest.approx(0.0, abs=1e-9)
    slope, error = power_law({1: 1.0, 2: 8.0})
    assert slope == pytest.approx(3.0)
    assert error is None
