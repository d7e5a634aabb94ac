"""Terminal output at the end of a sweep: candidates, picks and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.results.candidates import Candidate, Pick
from gomuon.lab.results.statistics import score_name

EDGES = {"lower": "picked, LOWEST", "upper": "picked, HIGHEST"}


def print_picks(plan: Plan, picks: Sequence[Pick], path: Path, console: Console) -> None:
    """A row per candidate, grouped by method; below, warnings and the command for a race."""
    grokking = plan.task == "grokking"
    momenta = any(candidate.momentum is not None for pick in picks for candidate in pick.candidates)
    table = Table(title=Text(plan.title), title_justify="left", title_style="bold")
    heads = ["method", *(["momentum"] if momenta else []), "rate"]
    heads += ["grok 99 %", "held out"] if grokking else [score_name(plan.task)]
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right")
    table.add_column("")
    for pick in picks:
        for index, candidate in enumerate(pick.candidates):
            best = candidate is pick.best
            row = [optimizers.title(pick.method) if index == 0 else ""]
            if momenta:
                row.append(w.ABSENT if candidate.momentum is None else f"{candidate.momentum:g}")
            row += [f"{candidate.rate:g}", statistic(candidate, plan.steps, grokking)]
            if grokking:
                row.append(w.accuracy(candidate.accuracy))
            row.append(verdict(pick, candidate))
            style = "" if not best else "bold yellow" if pick.edge else "bold green"
            last = index == len(pick.candidates) - 1
            table.add_row(*(Text(cell) for cell in row), style=style, end_section=last)
    console.print(table)
    for pick in picks:
        if (warning := pick.warning()) is not None:
            console.print(Text(f"WARNING  {warning}", style="bold yellow"))
    command = f"gomuon race --selection {path}"
    console.print(f"to race with these: {command}", markup=False, highlight=False, soft_wrap=True)


def statistic(candidate: Candidate, steps: int, grokking: bool) -> str:
    """A candidate's statistic as text."""
    if not candidate.finished:
        return "unfinished"
    if candidate.score is None:
        return "diverged"
    if not grokking:
        return f"{candidate.score:.5f}"
    return "never" if candidate.score > steps else f"{candidate.score:,.0f}"


def verdict(pick: Pick, candidate: Candidate) -> str:
    return EDGES.get(pick.edge or "", "picked") if candidate is pick.best else ""
