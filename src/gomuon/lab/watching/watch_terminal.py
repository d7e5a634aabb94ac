"""A run's records in the terminal: one row for each layer, those that stand out first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gomuon.lab.formatting import ABSENT
from gomuon.lab.watching.layer_views import DRIFTS, ILL, STARVED, LayerView, RunView

_BARS = "▁▂▃▄▅▆▇█"
_LETTERS = {DRIFTS: "D", ILL: "I", STARVED: "R"}
_STYLES = {DRIFTS: "yellow", ILL: "magenta", STARVED: "cyan"}
_AROUND = 14  # lines above and below the rows


def screen(run: RunView, path: Path, height: int | None = None) -> RenderableType:
    """The whole view; with a height, as many rows as fit."""
    title = Text.assemble(
        (str(path.name), "bold"), f"  {run.method}, step {run.step:,}, {len(run.layers)} layers"
    )
    headline = Text(f"{run.headline}.", style="bold")
    rows = len(run.layers) if height is None else max(3, height - _AROUND)
    return Group(title, headline, Text(), _curves(run), Text(), _table(run, rows), _legend(run))


def _curves(run: RunView) -> Table:
    """Medians over all layers since the start."""
    table = Table.grid("", "", "", padding=(0, 2))
    for name, number, shown in (
        ("η‖U‖/‖W‖", lambda r: r.update_ratio, ratio),
        ("cos(G, U)", lambda r: r.gradient_cosine, share),
        ("efficiency", lambda r: r.efficiency, share),
        ("κ(A)", lambda r: r.input_condition, large),
        ("κ(B̄)", lambda r: r.output_condition, large),
    ):
        medians = run.medians(number)
        if medians:
            logarithmic = shown is large
            table.add_row(name, spark(medians, logarithmic=logarithmic), shown(medians[-1]))
    return table


def _table(run: RunView, rows: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False)
    table.add_column("layer", no_wrap=True)
    for head in ("η‖U‖/‖W‖", "cos G", "eff.", "1/Θ", "κ(A)", "κ(B̄)", "rank"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    ordered = sorted(run.layers, key=lambda layer: -len(layer.remarks))
    shared = common_prefix([layer.name for layer in run.layers])
    for layer in ordered[:rows]:
        table.add_row(*_row(layer, shared))
    if len(ordered) > rows:
        table.add_row(f"and {len(ordered) - rows} more", style="dim")
    return table


def _row(layer: LayerView, shared: str) -> list[RenderableType]:
    rank = layer.rank
    letters = Text()
    for remark in layer.remarks:
        letters.append(_LETTERS[remark], style=f"bold {_STYLES[remark]}")
    return [
        short(layer.name.removeprefix(shared)),
        *newest_numbers(layer),
        ABSENT if rank is None else f"{rank[0]:.0f}/{rank[1]}",
        letters,
    ]


def newest_numbers(layer: LayerView) -> list[str]:
    """η‖U‖/‖W‖, the cosine with the gradient, efficiency, 1/Θ, κ(A) and κ(B̄)."""
    condition_a, condition_b = layer.conditions
    return [
        ratio(layer.last.update_ratio),
        share(layer.last.gradient_cosine),
        share(layer.efficiency),
        share(None if layer.drift is None else 1 / layer.drift),
        large(condition_a),
        large(condition_b),
    ]


def _legend(run: RunView) -> Text:
    legend = Text("\n", style="dim")
    for remark, letter in _LETTERS.items():
        legend.append(letter, style=f"bold {_STYLES[remark]}")
        legend.append(f" {remark}  ")
    return legend.append("(docs/watch.md)")


# ---- numbers and names in few letters ------------------------------------------------------------


def ratio(value: float | None) -> str:
    """A ratio that may be tiny, with two digits."""
    if value is None:
        return ABSENT
    return f"{value:.2g}" if value >= 1e-4 or not value else f"{value:.0e}"


def share(value: float | None) -> str:
    """A number in [-1, 1] with two decimals."""
    return ABSENT if value is None else f"{value:.2f}".replace("-", "−")


def large(value: float | None) -> str:
    """A number >= 1 with two or three digits and a suffix."""
    if value is None:
        return ABSENT
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit * 0.9995:
            scaled = value / divisor
            return f"{scaled:.1f}{suffix}" if scaled < 99.95 and suffix else f"{scaled:.0f}{suffix}"
    return f"{value:.0e}".replace("e+", "e")


def spark(values: Sequence[float], *, logarithmic: bool = False, width: int = 32) -> str:
    """A line of small bars, one for each of the last values or for several neighbours' mean."""
    numbers = [math.log(max(v, 1e-30)) for v in values] if logarithmic else list(values)
    size = -(-len(numbers) // width)
    means = [
        math.fsum(numbers[i : i + size]) / len(numbers[i : i + size])
        for i in range(0, len(numbers), size)
    ]
    low, high = min(means), max(means)
    step = (high - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (mean - low) / step))] for mean in means)


def common_prefix(names: Sequence[str]) -> str:
    """The modules that all names begin with, such as "model.layers."; "" for a single name."""
    if len(names) < 2:
        return ""
    modules = [name.split(".")[:-1] for name in names]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*modules, strict=False))
    return "".join(f"{level[0]}." for level in shared)


def short(name: str, width: int = 25) -> str:
    """A name in few letters: without a final ".weight", and with its middle left out."""
    name = name.removesuffix(".weight")
    if len(name) <= width:
        return name
    kept = width - 1
    return f"{name[: kept // 2]}…{name[-(kept - kept // 2) :]}"
