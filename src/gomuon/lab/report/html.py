"""Render a document as one self-contained HTML page.

It has no scripts, fonts or external addresses, so it opens offline and from an e-mail. The answer
comes first, then the plots, then the details.
"""

from __future__ import annotations

import base64
from html import escape as escape_html
from importlib import resources

from gomuon.lab.report.document import (
    Block,
    Document,
    Facts,
    Note,
    Plot,
    Section,
    Standing,
    Table,
    cell,
    visible,
)
from gomuon.lab.report.markdown import QUICK
from gomuon.lab.report.svg import DARK, LIGHT

LONG = 36  # longer cells may be broken into lines


def render_html(document: Document) -> str:
    """The whole page."""
    title = escape(document.title)
    body = [
        f'<p class="quick" role="note">{escape(QUICK)}</p>' if document.quick else "",
        f'<p class="kicker">{title}</p>',
        f"<h1>{escape(document.headline)}</h1>",
        f'<p class="evidence">{escape(document.evidence)}</p>' if document.evidence else "",
        f'<p class="introduction">{escape(document.introduction)}</p>',
        _standings(document.standings),
        *(_section(section) for section in document.sections),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'  # else a browser requests an icon
        f"<title>{title}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Escape text for markup and quoted attributes; keep numbers and per cent signs together."""
    return escape_html(visible(text)).replace(" %", "&nbsp;%")


def style() -> str:
    """The style sheet, with the palette of the plots as variables."""
    sheet = resources.files("gomuon.lab.report").joinpath("report.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f"--arm{i}:{color};" for i, color in enumerate(palette))
        for palette in (LIGHT, DARK)
    )
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        + "".join(f".arm{i}{{--arm:var(--arm{i})}}\n" for i in range(len(LIGHT)))
        + sheet
    )


def _standings(standings: tuple[Standing, ...]) -> str:
    if not standings:
        return ""
    cards = "\n".join(_standing(standing) for standing in standings)
    return f'<ol class="standings">\n{cards}\n</ol>'


def _standing(standing: Standing) -> str:
    winner = " winner" if standing.winner else ""
    return (
        f'<li class="card arm{standing.color % len(LIGHT)}{winner}">'
        f'<span class="place">{escape(standing.place)}</span>'
        f'<span class="name">{escape(standing.name)}</span>'
        f'<span class="figure">{escape(standing.result)}'
        f'<span class="unit">{escape(standing.unit)}</span></span>'
        f'<span class="remark">{escape(standing.remark)}</span></li>'
    )


def _section(section: Section) -> str:
    title = escape(section.title)
    blocks = "\n".join(_block(block) for block in section.blocks)
    if section.folded:
        return f"<details>\n<summary><h2>{title}</h2></summary>\n{blocks}\n</details>"
    return f"<section>\n<h2>{title}</h2>\n{blocks}\n</section>"


def _block(block: Block) -> str:
    match block:
        case Note():
            return f'<p class="{escape(block.tone or "plain")}">{escape(block.text)}</p>'
        case Facts():
            return _facts(block)
        case Plot():
            return _plot(block)
        case Table():
            return _table(block)


def _facts(facts: Facts) -> str:
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.pairs
    )
    return f"<dl>{pairs}</dl>"


def _plot(plot: Plot) -> str:
    sources = "".join(
        f'<source media="{media}" srcset="{_data(svg)}">\n'
        for media, svg in (
            ("(max-width:640px) and (prefers-color-scheme:dark)", plot.narrow_dark),
            ("(max-width:640px)", plot.narrow),
            ("(prefers-color-scheme:dark)", plot.wide_dark),
        )
    )
    return (
        f"<figure>\n<picture>\n{sources}"
        f'<img src="{_data(plot.wide)}" alt="{escape(plot.alt)}">\n</picture>\n'
        f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>"
    )


def _data(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _table(table: Table) -> str:
    # Only the table scrolls, not the page; tabindex makes it reachable with the keyboard.
    kinds = ["name" if i < table.left else "value" for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(column)}</th>'
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    rows = []
    for row in table.rows:
        if len(row) == 1:
            name = escape(cell(row[0]).text)
            rows.append(f'<tr><th colspan="{len(kinds)}" class="head">{name}</th></tr>')
            continue
        cells = []
        for kind, value in zip(kinds, row, strict=True):
            one = cell(value)
            text = f"<strong>{escape(one.text)}</strong>" if one.best else escape(one.text)
            long = " long" if len(one.text) > LONG else ""
            cells.append(f'<td class="{kind}{long}">{text}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = escape(table.caption)
    return (
        f'<p class="caption">{caption}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>\n</div>"
    )
