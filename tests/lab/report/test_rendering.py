"""The renderers escape all text."""

from __future__ import annotations

import re

import pytest

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
