"""A run's configuration refuses impossible numbers."""

from __future__ import annotations

from typing import Any

import pytest

from gomuon.lab.errors import LabError
from tests.lab.helpers.tiny_runs import addition


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"lr": -0.1}, "lr must be a positive number, not -0.1"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"seed": -1}, "seed must be between 0 and 18446744073709551615, not -1"),
        ({"seed": 2**64}, "seed must be between 0 and 18446744073709551615, not 1844"),
        ({"label": "fast"}, "label must be"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words):
        addition(**change)
