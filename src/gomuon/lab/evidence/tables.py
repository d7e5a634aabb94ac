"""Tables of the page. Cells are Markdown already; names from files pass through `text` first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gomuon.lab.report.markdown import escape

text = escape


def code(words: str) -> str:
    """A code span; what it holds comes from validated names and has no backtick."""
    return f"`{words.replace('`', '')}`".replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are names and whose other columns are figures."""
    marks = ["---" if index < left else "---:" for index in range(len(columns))]
    lines = [_row(columns), _row(marks)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells under {len(columns)} heads: {row}")
        lines.append(_row(row))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
