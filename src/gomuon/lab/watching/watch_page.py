"""A run's records as a self-contained page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gomuon.lab.formatting import ABSENT, many
from gomuon.lab.report.document import Block, Cell, Document, Note, Plot, Section, Table
from gomuon.lab.report.html import render_html
from gomuon.lab.report.svg import Style, make_plot
from gomuon.lab.watching.layer_views import (
    DRIFTS,
    ILL,
    LOW_EFFICIENCY,
    STARVED,
    LayerView,
    Number,
    RunView,
)
from gomuon.lab.watching.watch_terminal import common_prefix, newest_numbers

Curve = tuple[str, Number]
_SAID = {
    DRIFTS: f"The cached maps' direction reaches less than {100 * LOW_EFFICIENCY:.0f} % of what "
    "the new maps allow (Proposition 7). Refresh more often, or average A as well.",
    ILL: "A or B̄ has a condition number above 100,000, or the floor raised some of its "
    "eigenvalues: few rows, dead units, or inputs that hardly vary.",
    STARVED: "The source has fewer directions than the layer, or nearly all of its length in a "
    "tenth of them: some weights get hardly any gradient.",
}


def page(run: RunView, path: Path) -> str:
    """The page as HTML."""
    steps = [record.step for layer in run.layers for record in layer.records]
    first = min(steps, default=0)
    introduction = (
        f"{run.method}, {many(len(run.layers), 'layer')}, steps {first:,} to {run.step:,}, from "
        f"{path.name}. Lines are medians over all layers, bands reach from the smallest to the "
        "largest."
    )
    document = Document(
        "gomuon watch", f"{run.headline}.", "", introduction, sections=tuple(_sections(run))
    )
    return render_html(document)


def _sections(run: RunView) -> list[Section]:
    sections = []
    for remark, text in _SAID.items():
        if layers := run.with_remark(remark):
            names = ", ".join(layer.name for layer in layers)
            sections.append(
                Section(f"{remark[0].upper()}{remark[1:]}", (Note(text), Note(names, "quiet")))
            )
    plots = _plots(run)
    if plots:
        sections.append(Section("Over the run", plots))
    sections.append(Section("Layers", (_table(run),)))
    return sections


def _plots(run: RunView) -> tuple[Block, ...]:
    wanted: list[tuple[str, str, list[Curve], bool]] = [
        (
            "Efficiency of cached maps at refreshes, and the bound 1/Θ, Equation (36)",
            "efficiency",
            [("efficiency", lambda r: r.efficiency), ("1/Θ", lambda r: r.efficiency_bound)],
            False,
        ),
        ("Length of an update over that of the weights", "η‖U‖/‖W‖", [_RATIO], True),
        (
            "Condition numbers of A and B̄, floor included",
            "condition number",
            [("A", lambda r: r.input_condition), ("B̄", lambda r: r.output_condition)],
            True,
        ),
        (
            "Cosines of update and gradient, and of update and source",
            "cosine",
            [
                ("with the gradient", lambda r: r.gradient_cosine),
                ("with the source", lambda r: r.source_cosine),
            ],
            False,
        ),
        (
            "Effective rank of the weights, as a share of the full rank",
            "share",
            [("‖W‖_*²/‖W‖²", _rank_share)],
            False,
        ),
    ]
    return tuple(
        _plot(run, caption, axis, present, logarithmic)
        for caption, axis, curves, logarithmic in wanted
        if (present := [(name, number) for name, number in curves if run.series(number)])
    )


_RATIO: Curve = ("η‖U‖/‖W‖", lambda r: r.update_ratio)


def _rank_share(record: object) -> float | None:
    rank, full = getattr(record, "weight_rank", None), getattr(record, "full_rank", None)
    return rank / full if rank is not None and full else None


def _plot(
    run: RunView, caption: str, axis: str, curves: Sequence[Curve], logarithmic: bool
) -> Plot:
    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        for color, (name, number) in enumerate(curves):
            series = [
                (step, [v for v in all_of_them if v > 0 or not logarithmic])
                for step, all_of_them in run.series(number)
            ]
            series = [(step, values) for step, values in series if values]
            steps = [step for step, _ in series]
            lows, highs = [min(v) for _, v in series], [max(v) for _, v in series]
            axes.fill_between(steps, lows, highs, color=style.color(color), alpha=0.18, linewidth=0)
            medians = [statistics.median(v) for _, v in series]
            mark = "o" if len(steps) == 1 else None
            axes.plot(steps, medians, marker=mark, color=style.color(color), lw=2, label=name)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("step")
        axes.set_ylabel(axis)
        if len(curves) > 1:
            columns = len(curves) if style.wide else 1
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns)

    alt = f"{caption}; medians of all layers with their range, by step"
    return make_plot(caption, alt, draw_on, (3.0, 3.0))


def _power_of_ten(value: float, position: int) -> str:
    """1e-3 to 1e3 in full, others with their exponent."""
    return (
        f"{value:g}"
        if 1e-3 <= value <= 1e3
        else f"{value:.0e}".replace("e+0", "e").replace("e-0", "e−")
    )


def _table(run: RunView) -> Table:
    shared = common_prefix([layer.name for layer in run.layers])
    ordered = sorted(run.layers, key=lambda layer: -len(layer.remarks))
    caption = "The newest value of every number, layers that stand out first"
    if shared:
        caption += f"; names begin with {shared}"
    columns = (
        *("layer", "stands out", "η‖U‖/‖W‖", "cos(G, U)", "efficiency", "1/Θ", "κ(A)", "κ(B̄)"),
        *("source rank", "weight rank", "age", "negative ⟨G, U⟩"),
    )
    rows = tuple(_row(layer, shared) for layer in ordered)
    return Table(caption, columns, rows, left=2)


def _row(layer: LayerView, shared: str) -> tuple[Cell | str, ...]:
    rank, age = layer.rank, layer.last.age
    weight_rank = layer.latest(lambda r: r.weight_rank)
    counted = sum(record.gradient_negatives for record in layer.records)
    covered = sum(record.covered * record.matrices for record in layer.records)
    return (
        layer.name.removeprefix(shared),
        ", ".join(layer.remarks) or ABSENT,
        *newest_numbers(layer),
        ABSENT if rank is None else f"{rank[0]:.0f} of {rank[1]}",
        ABSENT if weight_rank is None else f"{weight_rank:.0f}",
        ABSENT if age is None else str(age),
        f"{counted} of {covered}",
    )
