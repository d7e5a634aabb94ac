"""Tables beside those of the models: kinds of operations, tokens per step, and growth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gomuon.lab.bench import operation_shares, tokens_per_step
from gomuon.lab.bench.bench_tables import number, with_error
from gomuon.lab.formatting import ABSENT
from gomuon.lab.report.document import Table


def titled(result: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Title and table of everything that was measured."""
    for title, make in (
        ("what a step computes", operations_table),
        ("tokens per step", tokens_table),
        ("growth", scaling_table),
    ):
        table = make(result)
        if table is not None:
            yield title, table


def operations_table(result: Mapping[str, Any]) -> Table | None:
    """FLOPs that an optimizer adds, by kind and dtype, and the time its step spends in Python."""
    found = result["operations"].get(operation_shares.MODEL)
    if found is None:
        return None
    kinds = (operation_shares.DECOMPOSITIONS, *operation_shares.DTYPES)
    rows = []
    for entry in found["arms"].values():
        if "failed" in entry:
            rows.append((entry["title"], entry["failed"]))
            continue
        mark = "" if entry["cycle"] else " *"
        shares = [_percent(entry["shares"].get(kind)) for kind in kinds]
        python = _percent(entry.get("python"))
        rows.append((entry["title"], f"{number(entry['flops'])}{mark}", *shares, python))
    heads = ("optimizer", "FLOPs", *kinds, "Python")
    caption = "The paper's model; * marks a count shorter than one cycle."
    return Table(caption, heads, tuple(rows))


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f} %"


def tokens_table(result: Mapping[str, Any]) -> Table | None:
    """Whole steps over forward and backward, by tokens per step."""
    found = result["tokens"].get(tokens_per_step.MODEL)
    if found is None:
        return None
    rows = []
    for entry in found["arms"].values():
        if "failed" in entry:
            rows.append((entry["title"], entry["failed"]))
            continue
        measured = zip(entry["whole"], entry["error"], strict=True)
        rows.append((entry["title"], *(with_error(*one) for one in measured)))
    heads = ("optimizer", *(f"{size:,} tokens" for size in found["sizes"]))
    caption = "Whole step over forward and backward of the model without hooks."
    return Table(caption, heads, tuple(rows))


def scaling_table(result: Mapping[str, Any]) -> Table | None:
    """Exponents, and step times divided by the time at the smallest size."""
    axes = result["scaling"]
    if not axes:
        return None
    heads, names = ["optimizer"], []
    for axis, found in axes.items():
        sizes = found["sizes"]
        heads += [f"exponent in {axis}", *(f"{axis} {size}" for size in sizes[1:])]
        names += [name for name in found["arms"] if name not in names]
    rows = []
    for name in names:
        row, title = [], name
        for found in axes.values():
            entry = found["arms"].get(name, {})
            title = entry.get("title", title)
            if "step" not in entry:
                row += [entry.get("failed", ABSENT), *[ABSENT] * (len(found["sizes"]) - 1)]
                continue
            first, *others = entry["step"]
            row.append(with_error(entry["exponent"], entry["error"], digits=2))
            row += [f"×{number(seconds / first)}" for seconds in others]
        rows.append((title, *row))
    firsts = " and ".join(f"{axis} {found['sizes'][0]}" for axis, found in axes.items())
    caption = f"Time of the optimizer's step; factors are over {firsts}."
    return Table(caption, tuple(heads), tuple(rows))
