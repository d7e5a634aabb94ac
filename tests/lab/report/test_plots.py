"""Plots can be drawn whatever the numbers are."""

from __future__ import annotations

import math
import warnings
from xml.etree import ElementTree

import pytest

from gomuon.lab.report import plots
from gomuon.lab.report.document import (
    Plot,
)
from gomuon.lab.report.plots import AccuracyCurve, AccuracyPanel, DifferenceRow, LossCurves
from gomuon.lab.report.svg import DARK, LIGHT


def variants(picture: Plot) -> list[str]:
    return [picture.wide, picture.wide_dark, picture.narrow, picture.narrow_dark]


def loss_arm(*values: float) -> LossCurves:
    return LossCurves("an $arm_", 0, (values,))


EDGES = [
    (1.0,),
    (1.0, 1.0),
    (math.nan,) * 5,
    (3.0, 2.0, math.inf, 1.0),
    tuple(1 / (i + 1) for i in range(3000)),
]


@pytest.mark.parametrize("values", EDGES, ids=lambda values: f"{len(values)} values")
def test_losses_are_drawn_whatever_they_are(values: tuple[float, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = plots.losses(
            "c",
            "a",
            [loss_arm(*values), LossCurves("b" * 200, 1, ((1.0, 2.0),))],
            [(1, 2)],
            [loss_arm(*values)],
            "an $arm_",
        )
    for svg in variants(picture):
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_accuracies_are_drawn_whatever_they_are() -> None:
    long = tuple((step, min(1.0, step / 900)) for step in range(1, 6001))
    runs = (
        AccuracyCurve("one point", 0, ((1, 0.5),), (), None),
        AccuracyCurve("nothing yet", 1, (), (), None),
        AccuracyCurve("long", 2, long, long[9::10], 900),
        AccuracyCurve("long", 2, long, long[9::10], 910),
        *(AccuracyCurve(f"another {i}", i, (), ((10, 1.0),), 10) for i in range(9)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = plots.grokking(
            "c", "a", [AccuracyPanel("p=3", runs), AccuracyPanel("", runs[:2])]
        )
    for svg in variants(picture):
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert len(picture.wide) < 300_000  # 6,000 updates do not make a heavy page


def test_differences_are_drawn_with_and_without_an_interval() -> None:
    rows = [
        DifferenceRow("one seed", 0, (-0.5,), -0.5, math.nan, math.nan),
        DifferenceRow("three", 1, (0.1, 0.2, 0.3), 0.2, -0.1, 0.5, "against <b>"),
        DifferenceRow("tie", 1, (0.0, 0.0), 0.0, 0.0, 0.0, "against c"),
    ]
    for svg in variants(plots.paired_differences("c", "a", rows)):
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_the_four_variants_differ_in_colour_and_shape() -> None:
    picture = plots.losses("c", "a", [loss_arm(3.0, 2.0, 1.0)], [(1, 3)])
    assert LIGHT[0] in picture.wide
    assert LIGHT[0] in picture.narrow
    assert DARK[0] in picture.wide_dark
    assert DARK[0] in picture.narrow_dark
    widths = [float(ElementTree.fromstring(s).attrib["width"][:-2]) for s in variants(picture)]
    assert widths[0] == widths[1] > 2 * widths[2] == 2 * widths[3]


def test_drawing_twice_gives_the_same_bytes() -> None:
    first, second = (plots.losses("c", "a", [loss_arm(3.0, 2.0)], [(1, 2)]) for _ in range(2))
    assert first == second
