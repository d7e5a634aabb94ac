"""docs/speed.md, and the report beside a benchmark's file: what is measured, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gomuon.lab import machine
from gomuon.lab.bench import measurement, tables
from gomuon.lab.report.document import Table
from gomuon.lab.report.markdown import escape, table_text

QUICK = """\
> **Quick run.** The models are smaller and the windows shorter than what the bars are about, so no
> verdict is given. `make bench` makes the full one."""
INTRODUCTION = """\
# Speed

Made by `gomuon bench --page` from `{file}`; `make bench` measures again.

Every number below is a ratio of two things measured in the same run of one process, in which all
optimizers take turns step by step: each has its own copy of the same model, and whoever went first
at one step goes later at the next. A slow moment of the machine so falls on all of them.

- **unit**: forward and backward passes of the model without hooks, as torch AdamW's copy runs them.
- **step**: `optimizer.step()` over that unit. Where a package takes matrices only, AdamW for the
  rest is inside.
- **whole step**: forward, backward and step, over the unit. What hooks cost shows here.
- **K**: steps from one renewal of an optimizer's geometry to the next. Means are over whole cycles
  of K, after {warmup} steps of warm-up; `*` marks a window that holds no whole cycle.
- **±**: the standard error over cycles, of both sides of the ratio as if they were independent,
  though slow moments are common to both; absent where there was one cycle. An optimizer that takes
  more than {allowance:.0f} s sits out after a whole cycle, unless a bar is about it.
- **floor**: the ratio if our side did nothing but the polar factors of its own sources, its maps,
  roots and moments, each at the best time it has alone in a core's caches, shared evenly among the
  cores: no momentum, no update, no AdamW, no waiting. Below it only other operations lead. Where
  both sides are ours, both do nothing else: that is no bound, but what the ratio tends to as
  overhead goes away.
- **state**: bytes the optimizer holds between steps, over the bytes of the parameters.
- **peak memory**: parameters, state and the most a whole step of a cycle allocates, over the same
  without an optimizer. From torch's allocation records of one thread; work space inside LAPACK is
  not in them.

All run at one learning rate ({rate:g}), on random data, in float32, with {threads}, on {where}
({date}, {versions}{commit})."""
ACCOUNT = """\
An exact polar factor takes an eigendecomposition and three products in float64, which is what keeps
it within 1e-5 of the float64 SVD at condition numbers up to 1e4; a float32 SVD costs about the same
and does not. Five Newton–Schulz steps take products in float32 alone and leave singular values
anywhere around one; torch Muon's are in bfloat16, quick on processors with units for it and many
times slower than float32 on others. Go-MUON adds two products on each side of the polar factor at
every step, and on refresh steps a product per captured moment, inside forward+backward, and an
eigendecomposition per factor. A factor as wide as the hidden layer of the MLP outweighs all of
those as wide as the model, so at K = 1 most of the step is that.

What is done about it: equal shapes are stacked once and stay so; layers that read one tensor share
its factor and root; symmetric products form one triangle; weights move through foreach and AdamW
through torch's fused kernel; and matrices are decomposed side by side, a thread for each core.
Models of up to four million parameters compute the rest of their step on one core, since OpenMP's
threads go on spinning for milliseconds after a parallel operation, on the very cores that
decompositions need. How far a step is from its polar factors, products and decompositions alone,
the floors say: a bar below them asks for more than a better arrangement of exact polar factors and
exact roots."""
SCALING = """\
The paper's architecture, one layer, as its width grows; then at one width, as layers are added. The
exponent is the slope of log time over log size by least squares, ± its standard error."""


def markdown(result: Mapping[str, Any], file: str, picture: str) -> str:
    """The whole page.

    Args:
        result: the content of a benchmark's file.
        file: the path of that file, as the page should name it.
        picture: the link to its drawing, without the ending.
    """
    parts = [INTRODUCTION.format(file=file, **_facts(result))]
    if result["size"] != "full":
        parts.append(QUICK)
    parts += ["## Bars", render(tables.bar_table(result)), _picture(picture)]
    parts += ["## Where the time goes", ACCOUNT]
    for title, table in tables.workload_tables(result):
        parts += [f"## {escape(title[0].upper() + title[1:])}", render(table)]
    scaling = tables.scaling_table(result)
    if scaling is not None:
        parts += ["## Growth", SCALING, render(scaling)]
    parts += ["## Who took part", render(tables.arm_table(result))]
    return "\n\n".join(parts) + "\n"


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    threads = result["threads"]
    versions = {name: result["versions"][name] for name in ("gomuon", "torch", "python")}
    return {
        "warmup": measurement.WARMUP,
        "allowance": measurement.ALLOWANCE,
        "rate": result["rate"],
        "threads": f"{threads} thread{'' if threads == 1 else 's'}",
        "where": f"{escape(result['machine']['processor'])}, {result['machine']['cores']} cores"
        + (f", {escape(result['vectors'])}" if "vectors" in result else ""),
        "date": result["date"],
        "versions": ", ".join(f"{name} {escape(version)}" for name, version in versions.items()),
        "commit": f", commit {machine.short_commit(result['commit'])}" if result["commit"] else "",
    }


def _picture(link: str) -> str:
    alt = "optimizer step and whole step of every optimizer on every model, and growth"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{link}-dark.svg">'
        f'<img alt="{alt}" src="{link}.svg"></picture>'
    )


def render(table: Table) -> str:
    return table_text(table, escape(table.caption))
