"""The results as tables of ratios, for docs/speed.md, the report and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gomuon.lab.bench import targets
from gomuon.lab.formatting import ABSENT
from gomuon.lab.report.document import Cell, Table

COLUMNS = ("optimizer", "K", "step", "whole step", "state", "peak memory")


def target_table(result: Mapping[str, Any]) -> Table:
    rows = []
    for checked in targets.check(result):
        target = checked.target
        shown = ABSENT if checked.ratio is None else with_error(checked.ratio, checked.error)
        verdict = Cell(checked.verdict, best=checked.verdict == "miss")
        lower_bound = ABSENT if checked.lower_bound is None else number(checked.lower_bound)
        rows.append(
            (str(target.number), target.title, f"{target.most:.2f}", shown, verdict, lower_bound)
        )
    caption = "Every line is a ratio within one run."
    return Table(
        caption, ("", "ratio", "at most", "measured", "", "lower bound"), tuple(rows), left=2
    )


def workload_tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Title and table of every measured model."""
    for name, work in result["workloads"].items():
        yield work["title"], workload_table(result, name)


def workload_table(result: Mapping[str, Any], name: str) -> Table:
    work = result["workloads"][name]
    if "failed" in work:
        return Table(f"Not measured: {work['failed']}", COLUMNS, ())
    rows = [_row(result, name, arm, entry) for arm, entry in work["arms"].items()]
    shape = ", ".join(f"{key} {value}" for key, value in work["shape"].items())
    caption = f"{work['parameters']:,} parameters ({shape}); {work['steps']} steps measured."
    return Table(caption, COLUMNS, tuple(rows))


def _row(
    result: Mapping[str, Any], workload: str, arm: str, entry: Mapping[str, Any]
) -> tuple[Cell | str, ...]:
    work = result["workloads"][workload]
    if "failed" in entry:
        return (entry["title"], str(entry.get("interval") or ABSENT), entry["failed"])
    step, whole = against_passes(work, arm, "step"), against_passes(work, arm, "whole")
    peak = ABSENT
    if entry["peak_bytes"] is not None:
        peak = number(entry["peak_bytes"] / work["bare_peak_bytes"])
    mark = "" if entry["step"]["cycles"] else " *"
    return (
        entry["title"],
        f"{entry['interval']}{mark}",
        ABSENT if step is None else with_error(*step),
        ABSENT if whole is None else with_error(*whole),
        number(entry["state_bytes"] / work["parameter_bytes"]),
        peak,
    )


def against_passes(
    work: Mapping[str, Any], arm: str, quantity: str
) -> tuple[float, float | None] | None:
    """The time of an arm divided by forward and backward of the model without hooks."""
    return targets.ratio({"workloads": {"": work}}, "", quantity, arm, targets.UNIT)


def arm_table(result: Mapping[str, Any]) -> Table:
    """The measured optimizers, with packages and notes."""
    rows: dict[str, tuple[str, ...]] = {}
    for work in result["workloads"].values():
        for name, entry in work["arms"].items():
            version = result["versions"].get(entry["package"], "")
            package = f"{entry['package']} {version}".strip()
            rows[name] = (entry["title"], f"{name}", package, entry["note"] or ABSENT)
    heads = ("optimizer", "name", "package", "note")
    return Table("Every other setting is its package's default.", heads, tuple(rows.values()), 4)


def with_error(value: float, error: float | None, digits: int | None = None) -> str:
    shown = number(value) if digits is None else f"{value:.{digits}f}"
    if error is None:
        return shown
    places = len(shown.partition(".")[2])
    return f"{shown} ± {error:.{places}f}"


def number(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"
