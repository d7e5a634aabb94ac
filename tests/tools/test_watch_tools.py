"""The measurements of what watching costs, and of ratios at good rates."""

import json
from pathlib import Path

import pytest

from tools import update_ratios, watch_cost

ROOT = Path(__file__).parents[2]


def test_every_arm_is_compared_with_one_that_was_never_watched() -> None:
    found = watch_cost.measure("tiny", windows=2)
    assert set(found) == set(watch_cost.ARMS) - {"never"}
    assert set(watch_cost.BARS) <= set(found)
    assert all(one["windows"] == 2 and one["ratio"] > 0 for one in found.values())


def test_the_bars_are_met_by_the_published_run() -> None:
    result = json.loads((ROOT / "results" / "watch" / "watch.json").read_text())
    assert result["bars"] == watch_cost.BARS
    for name, bar in watch_cost.BARS.items():
        assert result["ratios"][name]["ratio"] <= bar


def test_spans_go_from_the_smallest_median_to_the_largest_number() -> None:
    found = {
        "one": {"ratio": [0.001, 0.02, 0.1], "length": [0.2, 1.0, 3.0]},
        "two": {"ratio": [0.01, 0.03, 0.2], "length": [0.1, 2.0, 2.5]},
    }
    assert update_ratios.span(found) == {"ratio": [0.02, 0.2], "length": [1.0, 3.0]}
    published = json.loads((ROOT / "results" / "watch" / "ratios.json").read_text())
    for name, span in update_ratios.span(published["methods"]).items():
        assert published["span"][name] == pytest.approx(span)
