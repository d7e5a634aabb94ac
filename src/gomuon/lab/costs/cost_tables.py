"""A cost comparison as tables, for the terminal and docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gomuon.lab.costs.comparison import CostComparison
from gomuon.lab.costs.cycle import Spread
from gomuon.lab.costs.estimate import CostEstimate
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.experiments.optimizers import title
from gomuon.lab.formatting import ABSENT

FEW = 8  # owners shown without --owners


def human(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix, such as 1.53 TB."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5 or prefix == "E":
            break
        value /= 1000
    digits = 0 if value >= 99.5 or not prefix else 1 if value >= 9.95 else 2
    return f"{value:.{digits}f} {prefix}{unit}"


def most(value: Spread | None, unit: str) -> str:
    return ABSENT if value is None else human(value.largest, unit)


def mean(value: Spread | None, unit: str) -> str:
    return ABSENT if value is None else human(value.mean, unit)


def share(value: Spread | None, whole: float) -> str:
    """The largest work of a rank, as a percentage of forward and backward."""
    if value is None:
        return ABSENT
    percent = 100 * value.largest / whole
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def interval(estimate: CostEstimate) -> str:
    """K, and whether layers take turns."""
    every = str(estimate.refresh_every or ABSENT)
    return f"{every}, in turns" if takes_turns(estimate) else every


def takes_turns(estimate: CostEstimate) -> bool:
    """Whether refreshes are staggered and there is more than one step to do so."""
    return estimate.staggered and (estimate.refresh_every or 1) > 1


def cost_rows(comparison: CostComparison) -> list[tuple[str, ...]]:
    """Rows of the table of methods: a quantity, then one cell per method."""
    methods: Sequence[CostEstimate] = comparison.methods
    whole = comparison.model_flops
    first = ("work, first step", *(most(f.first, "FLOP") for f in methods))
    offloaded = ("state on the host, most", *(most(f.offloaded, "B") for f in methods))
    return [
        ("refresh every K", *(interval(f) for f in methods)),
        ("state, most", *(most(f.state, "B") for f in methods)),
        ("state, mean", *(mean(f.state, "B") for f in methods)),
        *([offloaded] if any(f.offloaded.largest for f in methods) else []),
        ("captured sums", *(human(f.moments, "B") for f in methods)),
        ("captured sums, at one time", *(human(f.held, "B") for f in methods)),
        ("work, reuse step", *(most(f.reuse, "FLOP") for f in methods)),
        ("work, refresh step", *(most(f.refresh, "FLOP") for f in methods)),
        ("work, amortised", *(most(f.amortised, "FLOP") for f in methods)),
        *([first] if any(f.first is not None for f in methods) else []),
        ("of model, reuse step", *(share(f.reuse, whole) for f in methods)),
        ("of model, refresh step", *(share(f.refresh, whole) for f in methods)),
        ("of model, amortised", *(share(f.amortised, whole) for f in methods)),
        ("sent, reuse step, most", *(most(f.sent_reuse, "B") for f in methods)),
        ("sent, reuse step, mean", *(mean(f.sent_reuse, "B") for f in methods)),
        ("sent, refresh step, most", *(most(f.sent_refresh, "B") for f in methods)),
        ("sent, refresh step, mean", *(mean(f.sent_refresh, "B") for f in methods)),
        ("imbalance of owners", *(f"{f.imbalance:.2f}" for f in methods)),
    ]


def heading(comparison: CostComparison) -> str:
    """The model, the ranks and the step in one sentence."""
    about = comparison.model, comparison.parameters, comparison.dtype
    return heading_of(*about, comparison.mesh, comparison.tokens)


def heading_of(model: str, parameters: int, dtype: str, mesh: Mesh, tokens: int) -> str:
    """The same of its parts."""
    ranks = "1 rank"
    if mesh.parts > 1:
        sizes = f"{mesh.replicas} × {mesh.shards} × {mesh.parts}"
        ranks = f"{mesh.ranks} ranks (replicas × shards × parts = {sizes})"
    elif mesh.ranks > 1:
        ranks = f"{mesh.ranks} ranks (replicas × shards = {mesh.replicas} × {mesh.shards})"
    return (
        f"{model}: {parameters:,} parameters in {dtype}, {ranks}, {tokens:,} tokens per rank and "
        "step"
    )


def notes(comparison: CostComparison) -> list[str]:
    """What to know about the numbers."""
    lines = [
        "All numbers are per rank; work is that of the busiest rank. Captured sums exist on "
        "refresh steps; with owners they are sent in the backward pass. Decompositions use "
        "textbook FLOP counts.",
        f"Forward and backward of the model: {human(comparison.model_flops, 'FLOP')}.",
    ]
    if comparison.mesh.ranks > 1:
        sent = human(comparison.wrapper, "B")
        lines.append(f"DDP or FSDP2 itself also sends {sent} from each rank in a step.")
    if any(map(takes_turns, comparison.methods)):
        lines.append(
            "In turns: a K-th of the units refreshes at each step (stagger); a refresh step is the "
            "busiest of the K."
        )
    if comparison.mesh.parts > 1:
        lines.append(parts_note(comparison.mesh.parts, comparison.exact))
    if comparison.replicate:
        lines.append("Every rank computes everything; only captured sums are exchanged.")
    if not comparison.shares:
        lines.append(
            "No forward pass was made: no two layers share an input here, and the model's FLOPs "
            "are 6·parameters·tokens. Give a shape with --input."
        )
    return lines


def parts_note(parts: int, exact: bool) -> str:
    """How layers are divided."""
    what = (
        "each matrix is whole at its owner, which gathers it"
        if exact
        else "each part is a matrix of its own; owners are numbered among the ranks that have it"
    )
    return (
        f"{parts} ranks divide each layer: {what}. What parallelize_module itself sends is not "
        "counted."
    )


def print_comparison(
    comparison: CostComparison, console: Console, every_owner: bool = False
) -> None:
    """Print treatments, methods, and the owners of the first method."""
    console.print(Text(heading(comparison), style="bold"))
    table = Table("treatment", "why", box=box.SIMPLE_HEAD)
    for head in ("tensors", "parameters"):
        table.add_column(head, justify="right")
    for entry in comparison.treated:
        table.add_row(entry.treatment, entry.reason, f"{entry.tensors:,}", f"{entry.parameters:,}")
    console.print(table)
    table = Table("", box=box.SIMPLE_HEAD)
    for estimate in comparison.methods:
        table.add_column(title(estimate.method), justify="right")
    for cells in cost_rows(comparison):
        table.add_row(*cells)
    console.print(table)
    for line in notes(comparison):
        console.print(Text(line))
    if comparison.mesh.ranks > 1 and comparison.methods[0].owned:
        _print_owners(comparison.methods[0], console, every_owner)


def _print_owners(estimate: CostEstimate, console: Console, every: bool) -> None:
    table = Table("owner", box=box.SIMPLE_HEAD)
    table.add_column("amortised", justify="right")
    table.add_column(f"layers, {title(estimate.method)}", overflow="fold")
    shown = estimate.owned if every else estimate.owned[:FEW]
    for unit, owner in shown:
        table.add_row(str(owner), human(unit.cost, "FLOP"), ", ".join(unit.names))
    console.print(table)
    left = len(estimate.owned) - len(shown)
    if left:
        console.print(Text(f"{left} more; show them with --owners", style="dim"))
