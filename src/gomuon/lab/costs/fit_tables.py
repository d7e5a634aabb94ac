"""The answers of `gomuon plan --fit` as text: which settings fit, and what they need and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gomuon.lab.costs.cost_tables import heading_of, human, parts_note
from gomuon.lab.costs.fitting import Fit, FitCandidate, Fitting
from gomuon.lab.experiments.optimizers import title

# Keys of `Need.parts`, as people call them.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "state": "optimizer state",
    "sums": "captured sums, at one time",
    "messages": "steps on their way",
    "reserve": "reserved",
}


def shown_settings(changes: Mapping[str, Any]) -> str:
    """As a user writes them in Python; "the defaults" if nothing is changed."""
    written = [
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in changes.items()
    ]
    return ", ".join(written) or "the defaults"


def shown_need(candidate: FitCandidate) -> str:
    """The total and its parts, such as 9.00 GB (weights 4.00 GB, …)."""
    need = candidate.need
    parts = [f"{PARTS[key]} {human(size, 'B')}" for key, size in need.parts.items() if size]
    return f"{human(need.total, 'B')} ({', '.join(parts)})"


def answer(fit: Fit, fitting: Fitting) -> str:
    """One line for one method."""
    name = title(fit.method)
    if fit.found is None:
        return f"{name}: nothing fits; below is what needs least."
    if fit.found.changes == fit.defaults.changes:
        return f"{name}: the defaults fit."
    why = f"need {human(fit.defaults.need.total, 'B')}"
    if fit.defaults.need.total <= fitting.bounds.memory:
        why = f"{percent(fit.defaults.share)} of the model's work"
    settings = shown_settings(fit.found.changes)
    return f"{name}: the defaults do not fit ({why}). First to fit: {settings}"


def refusal(fit: Fit, fitting: Fitting) -> str:
    """What is missing where nothing fits."""
    bounds = fitting.bounds
    bound = human(bounds.memory, "B")
    if bounds.share is not None:
        bound += f" and {percent(bounds.share)} of the model's work"
    small = fit.smallest
    return (
        f"nothing fits into {bound}; of {fit.tried} settings the smallest need is "
        f"{shown_need(small)}, with {shown_settings(small.changes)} and {percent(small.share)} of "
        "the model's work"
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def fit_rows(fitting: Fitting) -> list[tuple[str, ...]]:
    """Rows of the table: a quantity, then one cell per method, of its settings that fit.

    Where nothing fits, they are those of the smallest need.
    """
    shown = [fit.found or fit.smallest for fit in fitting.methods]
    needs = [candidate.need for candidate in shown]
    wrapper = human(fitting.wrapper, "B")
    hosts = [candidate.estimate.offloaded.largest for candidate in shown]
    host = ("on the host", *(human(size, "B") for size in hosts))
    return [
        ("fits", *("no" if fit.found is None else "yes" for fit in fitting.methods)),
        ("the defaults need", *(human(x.defaults.need.total, "B") for x in fitting.methods)),
        *((words, *(human(x.parts[key], "B") for x in needs)) for key, words in PARTS.items()),
        ("in all", *(human(need.total, "B") for need in needs)),
        ("left of the bound", *(_left(fitting.bounds.memory - need.total) for need in needs)),
        *([host] if any(hosts) else []),
        ("work of model, amortised", *(percent(x.share) for x in shown)),
        ("work of model, busiest step", *(percent(x.busiest_share) for x in shown)),
        ("sent, busiest step", *(human(x.busiest_bytes, "B") for x in shown)),
        ("sent by DDP or FSDP2 itself", *([wrapper] * len(shown))),
    ]


def _left(size: int) -> str:
    return human(size, "B") if size >= 0 else f"−{human(-size, 'B')}"


def fit_notes(fitting: Fitting) -> list[str]:
    """What the figures mean."""
    bounds, ranks = fitting.bounds, fitting.ranks
    parts = [parts_note(ranks.mesh.parts, ranks.exact)] if ranks.mesh.parts > 1 else []
    return [
        *parts,
        f"Of {human(bounds.memory, 'B')} on each rank {human(bounds.reserve, 'B')} are reserved "
        "(--reserve) for what is not known here: activations, what FSDP2 gathers, DDP's buckets, "
        "temporaries of the step, the allocator.",
        "Each part is that of its busiest rank, so their sum is an upper bound. "
        "docs/scaling.md has the order in which settings are tried.",
    ]


def print_fitting(fitting: Fitting, console: Console) -> None:
    """Print the answers, then memory, work and bytes beside each other."""
    planned = fitting.planned
    dtype = str(next(planned.model.parameters()).dtype).removeprefix("torch.")
    line = heading_of(planned.name, planned.parameters, dtype, fitting.ranks.mesh, planned.tokens)
    console.print(Text(line, style="bold"))
    for fit in fitting.methods:
        console.print(Text(answer(fit, fitting)))
    table = Table("", box=box.SIMPLE_HEAD)
    for fit in fitting.methods:
        table.add_column(title(fit.method), justify="right")
    for cells in fit_rows(fitting):
        table.add_row(*cells)
    console.print(table)
    for note in fit_notes(fitting):
        console.print(Text(note))
