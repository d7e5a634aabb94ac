"""Terminal output: the table at the end of a campaign, and the plan for `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.experiments.plan import Arm, Plan
from gomuon.lab.experiments.run_config import is_held_out
from gomuon.lab.formatting import ABSENT, duration
from gomuon.lab.results.runs import Run
from gomuon.lab.results.statistics import loss_score, score_name


def print_summary(plan: Plan, runs: Sequence[Run], console: Console) -> None:
    """One row per arm: means over its seeds, with the published result if there is one."""
    table = Table(title=titled(plan), title_justify="left", title_style="bold")
    if plan.task == "grokking":
        _grokking(plan, runs, table)
    else:
        _language(plan, runs, table)
    console.print(table)


def titled(plan: Plan) -> str:
    """The plan's title, with a label if it is short."""
    return plan.title + (f" (QUICK: {plan.steps} updates)" if plan.label == "quick" else "")


def _language(plan: Plan, runs: Sequence[Run], table: Table) -> None:
    table.add_column("arm")
    table.add_column("rate", justify="right")
    names = [window_name(window) for window in plan.windows]
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("geometric mean", justify="right")
    if is_held_out(plan.task):
        table.add_column(score_name(plan.task), justify="right")
    if plan.paper is not None:
        table.add_column("paper", justify="right")
    for arm in plan.arms:
        results = [run.result for run in _runs_of(arm, plan, runs) if run.result is not None]
        rates = {f"{run.config.lr:g}" for run in _runs_of(arm, plan, runs)}
        row = [arm.title, ", ".join(sorted(rates)) or ABSENT]
        row += [_mean([result["windows"].get(name) for result in results]) for name in names]
        row.append(_mean([result["geometric_mean"] for result in results]))
        if is_held_out(plan.task):
            row.append(_mean([loss_score(result) for result in results]))
        if plan.paper is not None:
            printed = plan.paper.geometric_mean.get(arm.name)
            row.append(ABSENT if printed is None else f"{printed:.5f}")
        table.add_row(*row)


def _grokking(plan: Plan, runs: Sequence[Run], table: Table) -> None:
    table.add_column("arm")
    table.add_column("p", justify="right")
    heads = ["seed", "train 99 %", "grok 99 %", "delay", "held out at the end"]
    for head in heads + (["paper's grok"] if plan.paper is not None else []):
        table.add_column(head, justify="right")
    for arm in plan.arms:
        for run in _runs_of(arm, plan, runs):
            result = run.result or {}
            row = [arm.title, str(run.config.modulus), str(run.config.seed)]
            for name in ("train_99_step", "grok_step", "delay"):
                row.append("never" if result.get(name) is None else str(result[name]))
            last = result.get("final_test_accuracy")
            row.append(ABSENT if last is None else f"{last:.1%}")
            if plan.paper is not None:
                row.append(str(plan.paper.grokking.get(arm.name, {}).get("grok_step", ABSENT)))
            table.add_row(*row)


def _runs_of(arm: Arm, plan: Plan, runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.config.arm == arm.name and run.config.seed in plan.seeds]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "diverged"
    return f"{math.fsum(known) / len(known):.5f}" if known else ABSENT


def print_plan(plan: Plan, costs: dict[str, float], jobs: int, console: Console) -> None:
    """The plan with the measured time of its arms and of the whole campaign."""
    table = Table(title=titled(plan), title_justify="left", title_style="bold")
    for head in ("arm", "optimizer", "rate", "options", "runs", "s / update"):
        table.add_column(head, justify="right" if head in ("runs", "s / update") else "left")
    for arm in plan.arms:
        tuning = len(arm.grid) if plan.tuning_seed is not None else 0
        grid = ", ".join(f"{rate:g}" for rate in arm.grid)
        rate = f"one of {grid}" if arm.lr is None else f"{arm.lr:g}"
        table.add_row(
            arm.title,
            arm.optimizer,
            rate,
            ", ".join(f"{key}={value}" for key, value in {**arm.options, **arm.settings}.items()),
            f"{len(plan.seeds)}" + (f" + {tuning} tuning" if tuning else ""),
            f"{costs[arm.name]:.3f}",
        )
    console.print(table)
    facts = {
        "seeds": ", ".join(map(str, plan.seeds))
        + (f"; tuning on {plan.tuning_seed}" if plan.tuning_seed is not None else ""),
        "updates": str(plan.steps),
        "windows": ", ".join(window_name(window) for window in plan.windows),
        "statistic": plan.statistic,
        "rule": plan.rule,
        "estimate": f"{duration(costs['total'])} with {jobs} jobs of {plan.threads} threads",
    }
    listing = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        if fact:
            listing.add_row(name, Text(fact))
    console.print(listing)
