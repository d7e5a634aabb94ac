"""Render a document as Markdown that is also readable as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gomuon.lab.report.document import (
    Block,
    Document,
    Facts,
    Note,
    Plot,
    Section,
    Table,
    cell,
    visible,
)

QUICK = "QUICK run: shortened, not comparable with the paper's results"


def render_markdown(document: Document) -> str:
    parts = [f"# {escape(document.title)}"]
    if document.quick:
        parts.append(f"> **{escape(QUICK)}**")
    parts.append(f"**{escape(document.headline)}**")
    parts += [_line(text) for text in (document.evidence, document.introduction) if text]
    if document.standings:
        rows = [
            f"| {escape(s.place)} | {escape(s.name)} | {escape(s.result)} {escape(s.unit)} "
            f"| {escape(s.remark)} |"
            for s in document.standings
        ]
        parts.append("\n".join(["| place | arm | result | |", "|---|---|---|---|", *rows]))
    parts += [_section(section) for section in document.sections]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Escape text for a line or a table cell."""
    text = " ".join(visible(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", text)
    return text.replace("://", r"\://")  # prevents automatic links


def _line(text: str) -> str:
    """A paragraph whose first characters cannot start a list or a heading."""
    return re.sub(r"^(\d+)?([-+.)=])", r"\1\\\2", escape(text))


def _section(section: Section) -> str:
    return "\n\n".join([f"## {escape(section.title)}", *(_block(b) for b in section.blocks)])


def _block(block: Block) -> str:
    match block:
        case Note():
            return f"> {_line(block.text)}" if block.tone == "warn" else _line(block.text)
        case Facts():
            return "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in block.pairs)
        case Plot():
            return f"*{escape(block.caption)}* (drawn in report.html). {escape(block.alt)}"
        case Table():
            return table_text(block, _line(block.caption))


def table_text(table: Table, caption: str) -> str:
    """The caption and the table below it."""
    marks = ["---" if i < table.left else "---:" for i in range(len(table.columns))]
    lines = [table_row([escape(column) for column in table.columns]), table_row(marks)]
    for row in table.rows:
        cells = [cell(value) for value in row]
        texts = [f"**{escape(c.text)}**" if c.best else escape(c.text) for c in cells]
        lines.append(table_row(texts + [""] * (len(table.columns) - len(texts))))
    return f"{caption}\n\n" + "\n".join(lines)


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
