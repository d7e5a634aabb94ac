"""Renderers escape everything, drawings survive any numbers, and thinning hides nothing."""

from __future__ import annotations

import math
import re
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest

from gomuon.lab.report import curves, plots
from gomuon.lab.report.document import (
    Block,
    Cell,
    Document,
    Facts,
    Note,
    Plot,
    Section,
    Standing,
    Table,
)
from gomuon.lab.report.html import render_html, style
from gomuon.lab.report.markdown import escape, render_markdown
from gomuon.lab.report.plots import AccuracyCurve, AccuracyPanel, DifferenceRow, LossCurves
from gomuon.lab.report.svg import DARK, LIGHT
from tests.lab.helpers.reports import Tags

MARK = "<b onclick=\"x\" class='y'>&amp;|*_`[z](w)</b>"


def document(*blocks: Block, folded: bool = False, **changes: object) -> Document:
    facts: dict[str, object] = {
        "title": "A title",
        "headline": "A headline",
        "evidence": "",
        "introduction": "An introduction",
        "sections": (Section("A section", blocks, folded),),
    }
    return Document(**(facts | changes))  # type: ignore[arg-type]


def variants(picture: Plot) -> list[str]:
    return [picture.wide, picture.wide_dark, picture.narrow, picture.narrow_dark]


BLOCKS: tuple[Block, ...] = (
    Note(MARK),
    Note(MARK, "warn"),
    Facts(((MARK, MARK),)),
    Table(MARK, (MARK, MARK), ((MARK, Cell(MARK, best=True)), (MARK,))),
    Plot(MARK, MARK, "<svg/>", "<svg/>", "<svg/>", "<svg/>"),
)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("folded", [False, True])
def test_every_part_of_a_page_is_escaped(block: Block, folded: bool) -> None:
    standing = Standing(MARK, MARK, MARK, MARK, MARK, color=99, winner=True)
    texts = dict.fromkeys(("title", "headline", "evidence", "introduction"), MARK)
    page = render_html(document(block, folded=folded, standings=(standing,), quick=True, **texts))
    tags = Tags(page)
    assert not [tag for tag, _ in tags.found if tag == "b"]
    assert not [a for _, a in tags.found if "onclick" in a or a.get("class") == "y"]
    assert " ".join(tags.text).count(MARK) >= 9  # it is all still there to read
    assert ("details" in [tag for tag, _ in tags.found]) == folded


@pytest.mark.parametrize("block", BLOCKS)
def test_every_part_of_the_markdown_is_escaped(block: Block) -> None:
    text = render_markdown(
        document(block, title=MARK, headline=MARK, evidence=MARK, introduction=MARK)
    )
    assert "<" not in text
    assert not re.search(r"(?<!\\)[`\[]", text)
    assert not re.search(r"(?<![\\*\n])\*(?!\*|amp|&)[a-z]", text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a|b", r"a\|b"),
        ("two\nlines\r\n# no heading", r"two lines \# no heading"),
        ("1 < 2 & 3 > 2", "1 &lt; 2 &amp; 3 &gt; 2"),
        ("https://example.invalid", r"https\://example.invalid"),
        ("\\*", r"\\\*"),
        ("plain (K=4), lr 0.08", "plain (K=4), lr 0.08"),
    ],
)
def test_markdown_escapes(name: str, expected: str) -> None:
    assert escape(name) == expected


@pytest.mark.parametrize("start", ["1. one", "- one", "+ one", "= one", "12) one"])
def test_a_paragraph_does_not_become_a_list(start: str) -> None:
    line = render_markdown(document(Note(start))).strip().splitlines()[-1]
    assert not re.match(r"(\d+[.)]|[-+=])", line)


def test_tables_keep_their_shape() -> None:
    table = Table("Caption", ("name", "figure"), (("group",), ("a", Cell("1", best=True))))
    text = render_markdown(document(table))
    assert text.endswith("| name | figure |\n| --- | ---: |\n| group |  |\n| a | **1** |\n")
    page = render_html(document(table))
    assert '<th colspan="2" class="head">group</th>' in page
    assert '<td class="value"><strong>1</strong></td>' in page
    assert 'role="region" tabindex="0"' in page  # a keyboard can scroll it


def test_both_palettes_reach_the_page() -> None:
    sheet = style()
    assert len(LIGHT) == len(DARK)
    assert all(color in sheet for color in (*LIGHT, *DARK))


def test_quick_is_said_before_anything_else() -> None:
    page = render_html(document(quick=True))
    assert page.index("QUICK") < page.index("<h1>")
    assert "QUICK" not in render_html(document())
    assert render_markdown(document(quick=True)).splitlines()[2].startswith("> **QUICK")


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
