"""What became of each statement, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gomuon.lab.formatting import ABSENT
from gomuon.lab.verification.adversary import Effort, Found
from gomuon.lab.verification.live_checks import Tally
from gomuon.lab.verification.statement import Statement

CAPTION = """\
tried: instances of the search; live: checks while the optimizer trained.
slack: what is left before the statement breaks, in the worst case of both.
  Of a bound, the share of it that was not reached; of an identity, minus
  the largest error; of "may", how far the clearest example is beyond its mark."""


@dataclass(frozen=True)
class Verdict:
    """What the search and the live run found for one statement."""

    statement: Statement
    found: Found
    watched: Tally

    @property
    def slack(self) -> float:
        """The worst of search and live run; NaN if one is NaN."""
        both = (self.found.slack, self.watched.slack)
        return math.nan if any(map(math.isnan, both)) else min(both)

    @property
    def holds(self) -> bool:
        return self.slack >= -self.statement.allowed  # False for NaN

    def as_dict(self) -> dict[str, Any]:
        live = {"checks": self.watched.count, "slack": _number(self.watched.slack)}
        return {
            "statement": self.statement.name,
            "where": self.statement.where,
            "says": self.statement.says,
            "tried": self.found.tried,
            "slack": _number(self.found.slack),
            "allowed": self.statement.allowed,
            "live": live if self.watched.count else None,
            "holds": self.holds,
        }


def judge(
    statements: Sequence[Statement], watched: Mapping[str, Tally], effort: Effort
) -> list[Verdict]:
    """Search for the worst case of every statement."""
    return [
        Verdict(
            statement,
            statement.search(effort, effort.generator(statement.name)),
            watched.get(statement.name, Tally()),
        )
        for statement in statements
    ]


def as_dict(verdicts: Sequence[Verdict], effort: Effort) -> dict[str, Any]:
    return {
        "device": str(effort.device),
        "seeds": effort.seeds,
        "holds": all(verdict.holds for verdict in verdicts),
        "statements": [verdict.as_dict() for verdict in verdicts],
    }


def print_verdicts(verdicts: Sequence[Verdict], effort: Effort, console: Console) -> None:
    many = f"{effort.seeds} seed{'s' if effort.seeds > 1 else ''}"
    table = Table(
        title=f"on {effort.device}, {many}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in ("statement", "from", "tried", "slack", "live", ""):
        table.add_column(head, justify="right" if head in ("tried", "slack", "live") else "left")
    for verdict in verdicts:
        count = verdict.watched.count
        table.add_row(
            verdict.statement.name,
            verdict.statement.where,
            f"{verdict.found.tried:,}",
            _short(verdict.slack),
            f"{count:,}" if count else ABSENT,
            Text("holds") if verdict.holds else Text("FAILS", style="bold red"),
        )
    console.print(table, markup=False)
    console.print(CAPTION, markup=False, highlight=False)


def failure(verdict: Verdict) -> str:
    """A statement that fails, in words."""
    where = [
        f"{name} {_short(slack)}"
        for name, slack in (("search", verdict.found.slack), ("live", verdict.watched.slack))
        if not slack >= -verdict.statement.allowed
    ]
    statement = verdict.statement
    return f"{statement.name} ({statement.where}; slack {', '.join(where)})"


def _short(slack: float) -> str:
    if abs(slack) >= 0.001:
        return f"{slack:.3f}".replace("-", "−")
    return "0" if slack == 0 else f"{slack:.0e}".replace("-", "−", 1 if slack < 0 else 0)


def _number(value: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)
