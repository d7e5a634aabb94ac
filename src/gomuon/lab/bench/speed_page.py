"""docs/speed.md, and the report.md of a benchmark: what is measured, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gomuon.lab import machine
from gomuon.lab.bench import bench_tables, further_tables, measurement
from gomuon.lab.report.document import Table
from gomuon.lab.report.markdown import escape, table_text

QUICK = """\
> **Quick run.** The models are smaller and the windows shorter than in the full benchmark, so there
> is no verdict on the targets. Run `make bench` for the full one."""
INTRODUCTION = """\
# Speed

Made by `gomuon bench --page` from `{file}`; `make bench` measures again.

Every number below is a ratio of two things measured in the same run of one process. All optimizers
make their steps in turn, each on its own copy of the same model, and the order changes from step to
step. A slow moment of the machine therefore affects all of them.

- **unit**: forward and backward of the model without hooks, as measured with torch AdamW.
- **step**: `optimizer.step()` divided by that unit. If a package takes matrices only, AdamW for the
  other parameters is included.
- **whole step**: forward, backward and step, divided by the unit. It includes the cost of hooks.
- **K**: steps between two refreshes of an optimizer's geometry. Means are over whole cycles of K
  steps, after {warmup} warm-up steps; `*` marks a measurement shorter than one cycle.
- **±**: the standard error over cycles. The two sides of a ratio are treated as independent, though
  slow moments affect both. It is absent if there was one cycle. An optimizer that has taken more
  than {allowance:.0f} s stops after a whole cycle, unless a target needs it.
- **lower bound**: the ratio if our side computed nothing but its polar factors, maps, roots and
  moments, each at its best time when run alone, divided evenly among the cores: no momentum, no
  update, no AdamW, no waiting. Only other operations could be faster. If both sides are ours, both
  are counted this way; then it is not a bound, but the value the ratio approaches as overhead
  goes to zero.
- **state**: bytes of optimizer state between steps, divided by the bytes of the parameters.
- **peak memory**: parameters, state and the largest allocation of a whole step over one cycle,
  divided by the same without an optimizer. From torch's allocation records of one thread; work
  space inside LAPACK is not included.

All use one learning rate ({rate:g}), random data and float32, with {threads}, on {where}
({date}, {versions}{commit})."""
ACCOUNT = """\
An exact polar factor on the CPU takes an eigendecomposition and three products in float64. That
keeps it within 1e-5 of the float64 SVD for condition numbers up to 1e4; a float32 SVD takes about
as long and does not reach this accuracy. A fast one takes products in float32 only, as many as its
accuracy needs. Five Newton–Schulz steps are fewer products and leave the singular values somewhere
around one; those of torch Muon are in bfloat16, which is fast on processors with bfloat16 units and
many times slower than float32 on others. Go-MUON adds two products on each side of the polar factor
at every step. A refresh step adds one product per captured moment, inside forward+backward, and one
root per factor. A factor as wide as the hidden layer of the MLP costs more than all factors as wide
as the model, so at K = 1 it takes most of the step.

What makes the step fast: equal shapes are stacked once and stay stacked; layers that read the same
tensor share its factor and root; symmetric products compute one triangle; weights are updated with
foreach operations and AdamW uses torch's fused kernel; matrices are decomposed in parallel, one
thread per core (never on several: a second thread on several cores would slow down every operation
of the process). Models of up to four million parameters compute the rest of their step on one core:
after a parallel operation OpenMP's threads keep spinning for milliseconds, on the cores that the
decompositions need. The lower bounds show how far a step is from its polar factors, products and
roots alone: a target below its lower bound cannot be met with the same operations."""
OPERATIONS = """\
What an optimizer adds to forward and backward, moments included, from a record of every operation
of one refresh cycle.

- **FLOPs**: of products and decompositions, divided by those of forward and backward. Elementwise
  work is not counted.
- **decompositions**: their share of these FLOPs. They are estimated, an eigendecomposition as 9n³;
  a decomposition reaches only a fraction of the FLOPs per second that a product does.
- **float64, float32, bfloat16**: the shares of the dtypes, decompositions included.
- **Python**: the time of `optimizer.step()` for the same layers made very narrow, divided by its
  time at their real width, measured in turn. Narrow matrices have next to nothing to compute, so
  this is what Python and torch's calls take at any width. Threads are not counted: narrow
  matrices are not shared out among them."""
TOKENS = """\
The paper's model with more and more sequences in a batch. The optimizer's step costs the same for
any number of tokens, so the whole step approaches forward and backward; of Go-MUON's work only the
moments grow with the tokens."""
SCALING = """\
The paper's architecture with one layer and growing width, then with one width and a growing number
of layers. The exponent is the least-squares slope of log time over log size, ± its standard
error."""


ALONE = """\
Measured in a run of its own, with the optimizers that the targets name and more cycles, so that the
errors are small (`{file}`, {date}{commit})."""


def markdown(
    result: Mapping[str, Any],
    file: str,
    plot: str,
    judged: tuple[str, Mapping[str, Any]] | None = None,
) -> str:
    """The whole page.

    Args:
        result: the content of a benchmark's file.
        file: the path of that file, as the page should name it.
        plot: the link to its plot, without the file extension.
        judged: the file of a run that only judges the targets, and its content; default: `result`.
    """
    parts = [INTRODUCTION.format(file=file, **_facts(result))]
    if result["size"] != "full":
        parts.append(QUICK)
    parts.append("## Targets")
    if judged is not None:
        parts.append(ALONE.format(file=judged[0], **_facts(judged[1])))
    parts += [render(bench_tables.target_table(judged[1] if judged else result)), _plot(plot)]
    parts += ["## Where the time goes", ACCOUNT]
    for title, table in bench_tables.workload_tables(result):
        parts += [f"## {escape(title[0].upper() + title[1:])}", render(table)]
    for title, about, further in (
        ("What a step computes", OPERATIONS, further_tables.operations_table(result)),
        ("Tokens per step", TOKENS, further_tables.tokens_table(result)),
        ("Growth", SCALING, further_tables.scaling_table(result)),
    ):
        if further is not None:
            parts += [f"## {title}", about, render(further)]
    parts += ["## Optimizers", render(bench_tables.arm_table(result))]
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


def _plot(link: str) -> str:
    alt = "optimizer step and whole step of every optimizer on every model, and growth"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{link}-dark.svg">'
        f'<img alt="{alt}" src="{link}.svg"></picture>'
    )


def render(table: Table) -> str:
    return table_text(table, escape(table.caption))
