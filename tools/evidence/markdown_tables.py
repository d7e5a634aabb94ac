"""Markdown of the page: tables, code spans, and numbers as words.

Cells of a table are Markdown already; names that come from files pass through `text` or `code`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gomuon.lab import formatting as w
from gomuon.lab.report.document import visible
from gomuon.lab.report.markdown import escape

NOT_RUN = "not run yet"
DIVERGED = "diverged"

text = escape


def code(words: str) -> str:
    """A code span on one line; backticks are dropped, because none of our names has one."""
    line = " ".join(visible(words).split())
    return f"`{line.replace('`', '')}`".replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are aligned left (names), the others right (numbers)."""
    marks = ["---" if index < left else "---:" for index in range(len(columns))]
    lines = [_row(columns), _row(marks)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells under {len(columns)} heads: {row}")
        lines.append(_row(row))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def measure_name(measure: str) -> str:
    """A window such as 201-300 with a dash between its ends; other measures as they are."""
    return measure.replace("-", "–")


def percent_interval(low: float, high: float) -> str:
    """Two shares as signed per cent, such as −0.91 to +0.12 %."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return w.ABSENT
    return f"{w.signed(100 * low, 2)} to {w.signed(100 * high, 2)} %"


def plain_interval(low: float, high: float, decimals: int = 5) -> str:
    """Two numbers, without a sign where they are positive."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return w.ABSENT
    return f"{low:.{decimals}f} to {high:.{decimals}f}".replace("-", "−")


def unsigned_percent(share: float) -> str:
    """A share without its sign, such as 0.38 %."""
    return f"{abs(100 * share):.2f} %"


def lower_or_higher(share: float) -> str:
    """A relative difference in words, such as 0.38 % lower."""
    return f"{unsigned_percent(share)} {'lower' if share < 0 else 'higher'}"
