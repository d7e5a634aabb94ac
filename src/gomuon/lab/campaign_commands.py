"""The commands that run a campaign: race, tune and reproduce."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from gomuon.lab import machine
from gomuon.lab.experiments import catalogue, own_code, racing, tuning
from gomuon.lab.experiments.plan import Plan, adapt
from gomuon.lab.experiments.selection import EXPERIMENT, read_selection
from gomuon.lab.flags import (
    NO_DEFAULT_SHOWN,
    Flag,
    ModelShape,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
)
from gomuon.lab.input_checks import errors_naming, require_whole
from gomuon.lab.report import terminal_summary, terminal_sweep
from gomuon.lab.results.candidates import picks_of, write_selection
from gomuon.lab.results.runs import Run
from gomuon.lab.running import execution
from gomuon.lab.running.progress import open_display
from gomuon.lab.running.timing import estimate_seconds
from gomuon.lab.terminal import SafeConsole

Conclusion = Callable[[Plan, Sequence[Run], Console], None]

SHAPE = ModelShape()
# The words of the command that is running, which a campaign records.
ARGV: ContextVar[Sequence[str] | None] = ContextVar("argv", default=None)


def race(
    task: OptionalText = "",
    optimizers: OptionalText = "",
    lr: OptionalText = "",
    options: OptionalText = "",
    selection: OptionalPath = None,
    seeds: OptionalText = "",
    steps: OptionalInt = None,
    adamw_lr: OptionalFloat = None,
    shape: tyro.conf.OmitArgPrefixes[ModelShape] = SHAPE,
    timing: Flag = False,
    target: OptionalFloat = None,
    jobs: OptionalInt = None,
    threads: OptionalInt = None,
    data_dir: OptionalPath = None,
    out: OptionalPath = None,
) -> None:
    """Race optimizers against each other, from the same initial parameters on the same data.

    Without arguments: Go-MUON, Muon and AdamW learn modular addition on five seeds, which takes a
    quarter of an hour on two cores and downloads nothing; --seeds 0 takes three minutes. You can
    stop it at any time: the same command continues.

    Args:
        task: grokking (modular addition, the default), ptb, shakespeare and others (docs/tasks.md);
            or a class of your own, as package.module:Class or path/to/file.py:Class (docs/own.md).
        optimizers: Names separated by commas. Default: go-muon,muon,adamw. The first is compared
            with each of the others. gomuon methods lists all names; a class of torch's kind is
            named like a task, such as torch.optim:Muon.
        lr: Peak rates of the matrices, such as go-muon=.08,muon=.16; others keep their default.
        options: Further keywords, such as go-muon.refresh_every=8,torch.optim:Muon.nesterov=False.
        selection: A selection.json, written by gomuon tune or reproduce. Task, optimizers, model,
            rates and momenta come from it unless given here.
        seeds: Such as 0,1,2 or 0-2; all optimizers run on every seed. Default: 0-4; with a
            selection the first five seeds that it did not use.
        steps: Updates per run. Default: the task's own number; with fewer than half of it, results
            are labelled "quick".
        adamw_lr: Peak rate of embeddings, norms and vectors. Default: 1e-2 for grokking, else 3e-3.
        timing: At the end, measure the step times of all optimizers in turn.
        target: A loss, declared before the race; the report compares the updates to reach it. On
            tasks with held-out data it is a validation loss.
        jobs: Runs at the same time. Default: one per core.
        threads: Threads per run. Default: the cores divided by the jobs.
        data_dir: Folder with the corpora. Default: GOMUON_DATA, else the cache, else download.
        out: Folder for the results. Default: runs/race-TASK (runs/race-TASK-tuned).
    """
    picked = None if selection is None else read_selection(selection)
    if picked is not None:
        task, optimizers = task or picked.task, optimizers or ",".join(picked.picked)
    task = task or "grokking"
    plan = racing.race_plan(
        task,
        optimizers or racing.OPTIMIZERS,
        rates=lr,
        options=options,
        seeds=seeds,
        steps=steps,
        adamw_lr=adamw_lr,
        selection=picked,
        timing=timing,
        target=target,
        **shape.as_dict(),
    )
    folder = out or Path("runs") / f"race-{own_code.slug(task)}{'' if picked is None else '-tuned'}"
    jobs, threads = jobs_and_threads(len(plan.arms) * len(plan.seeds), jobs, threads, folder)
    carry_out(adapt(plan, threads=threads), folder, jobs, data_dir)


def tune(
    task: str = "grokking",
    optimizers: str = "go-muon,muon,adamw",
    grid: OptionalInt = None,
    ratio: float = tuning.RATIO,
    rates: OptionalText = "",
    options: OptionalText = "",
    momenta: OptionalText = "",
    seeds: str = "0",
    steps: OptionalInt = None,
    adamw_lr: OptionalFloat = None,
    shape: tyro.conf.OmitArgPrefixes[ModelShape] = SHAPE,
    dry_run: Flag = False,
    jobs: OptionalInt = None,
    threads: OptionalInt = None,
    data_dir: OptionalPath = None,
    out: OptionalPath = None,
) -> None:
    """Try several learning rates with the same budget for every method, and pick the best ones.

    The plan is written to a file before anything runs. The picked rates go to selection.json, for
    gomuon race --selection. You can stop it at any time: the same command continues.

    Args:
        task: grokking (modular addition), ptb, shakespeare and others (docs/tasks.md); or a class
            of your own, as package.module:Class or path/to/file.py:Class (docs/own.md).
        optimizers: Names separated by commas; gomuon methods lists all names. Classes as for race.
        grid: Number of rates per method, around its default rate. Default: 5, or as in --rates.
        ratio: Each rate divided by the next lower one.
        rates: Your own rates, such as go-muon=.02/.04/.08,muon=.01/.02/.04; as many for each.
        options: Further keywords, such as go-muon.refresh_every=8, for all rates of a method.
        momenta: Such as .8,.95; tried with every rate of the methods that have a momentum. Methods
            without one get the same number of candidates from a finer grid.
        seeds: Such as 0,1,2 or 0-2; the statistic is averaged over them.
        steps: Updates per run, also the length of the schedule. Default: the task's own number.
        adamw_lr: Peak rate of embeddings, norms and vectors. Default: 1e-2 for grokking, else 3e-3.
        dry_run: Print the plan and a time estimate from a few real updates; train nothing.
        jobs: Runs at the same time. Default: one per core.
        threads: Threads per run. Default: the cores divided by the jobs.
        data_dir: Folder with the corpora. Default: GOMUON_DATA, else the cache, else download.
        out: Folder for the results. Default: runs/tune-TASK.
    """
    plan = tuning.tune_plan(
        task,
        optimizers,
        grid=grid,
        ratio=ratio,
        rates=rates,
        options=options,
        momenta=momenta,
        seeds=seeds,
        steps=steps,
        adamw_lr=adamw_lr,
        **shape.as_dict(),
    )
    folder = out or Path("runs") / f"tune-{own_code.slug(task)}"
    parallel, each = jobs_and_threads(len(plan.arms) * len(plan.seeds), jobs, threads, folder)
    plan = adapt(plan, threads=each)
    if dry_run:
        execution.check(plan, data_dir)
        terminal_summary.print_plan(
            plan, estimate_seconds(plan, parallel, data_dir), parallel, SafeConsole()
        )
        return

    def conclude(plan: Plan, runs: Sequence[Run], console: Console) -> None:
        picks = picks_of(plan, runs)
        path = write_selection(folder, plan, picks)
        terminal_sweep.print_picks(plan, picks, path, console)

    carry_out(plan, folder, parallel, data_dir, conclude)


NAMES = (
    f"{', '.join(catalogue.EXPERIMENTS)}, or all for these {len(catalogue.EXPERIMENTS)}; for "
    f"questions the paper leaves open: {', '.join(catalogue.OPEN_QUESTIONS)}."
)


def reproduce(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help=NAMES)],
    /,
    seeds: Annotated[str | None, NO_DEFAULT_SHOWN] = None,
    steps: OptionalInt = None,
    selection: OptionalPath = None,
    quick: Flag = False,
    dry_run: Flag = False,
    jobs: OptionalInt = None,
    threads: OptionalInt = None,
    data_dir: OptionalPath = None,
    out: OptionalPath = None,
) -> None:
    """Repeat an experiment of the paper and compare its numbers with your own.

    The plan (arms, seeds, windows, statistic, rule) is written to a file before anything runs. You
    can stop it at any time: the same command continues, and finished runs are not repeated.

    Args:
        name: One of the catalogue's plans, or all.
        seeds: Such as 0,1 or 17402-17404, instead of the experiment's own.
        steps: Updates per run; with fewer than the experiment's own, results are labelled "quick".
        selection: A selection.json, as for gomuon race; its rates and momenta replace the
            experiment's own.
        quick: A short version of a few minutes; its results are labelled "quick".
        dry_run: Print the plan and a time estimate from a few real updates; train nothing.
        jobs: Runs at the same time. Default: one per core.
        threads: Threads per run. Default: the cores divided by the jobs.
        data_dir: Folder with the corpora. Default: GOMUON_DATA, else the cache, else download.
        out: Folder for the results. Default: runs/NAME (runs/NAME-tuned-quick).
    """
    plans = list(catalogue.EXPERIMENTS.values()) if name == "all" else [catalogue.find(name)]
    if selection is not None:
        picked = read_selection(selection)
        plans = [catalogue.with_selection(plan, picked) for plan in plans]
    chosen = None if seeds is None else racing.parse_seeds(seeds)
    for declared in plans:
        plan = adapt(declared, quick=quick, seeds=chosen, steps=steps)
        suffix = "" if selection is None else "-tuned"
        suffix += "-quick" if plan.label == "quick" else ""
        folder = Path("runs") / f"{plan.experiment}{suffix}" if out is None else out
        if out is not None and name == "all":
            folder = out / plan.experiment
        runs = len(plan.tuning_configs()) + len(plan.arms) * len(plan.seeds)
        parallel, each = jobs_and_threads(runs, jobs, threads, folder)
        plan = adapt(declared, quick=quick, seeds=chosen, steps=steps, threads=each)
        if dry_run:
            execution.check(plan, data_dir)
            costs = estimate_seconds(plan, parallel, data_dir)
            terminal_summary.print_plan(plan, costs, parallel, SafeConsole())
        else:
            carry_out(plan, folder, parallel, data_dir)


def jobs_and_threads(
    runs: int, jobs: int | None, threads: int | None, folder: Path
) -> tuple[int, int]:
    """Numbers of parallel runs and of threads per run.

    A campaign keeps its first number of threads, because its results depend on it.
    """
    for name, value in (("jobs", jobs), ("threads", threads)):
        if value is not None:
            require_whole(f"--{name}", value)
    parallel = jobs or min(machine.cores(), runs)
    each = threads or execution.recorded_threads(folder) or max(1, machine.cores() // parallel)
    return parallel, each


def carry_out(
    plan: Plan,
    folder: Path,
    jobs: int,
    data_dir: Path | None,
    conclude: Conclusion = terminal_summary.print_summary,
) -> None:
    """Run a plan, show its progress, print its table and write its report."""
    console = SafeConsole()
    console.print(terminal_summary.titled(plan), style="bold", markup=False, highlight=False)
    if plan.experiment == EXPERIMENT:
        console.print(f"Rule: {plan.rule}", markup=False, highlight=False)
    with open_display(plan, console) as display:
        runs = execution.run_campaign(
            plan, folder, jobs=jobs, observer=display, data_dir=data_dir, argv=ARGV.get()
        )
    with errors_naming(folder):
        conclude(plan, runs, console)
    write_report(folder)
    console.print(
        f"report: {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True
    )


def write_report(folder: Path) -> None:
    # Imported here: matplotlib is slow to import, and a campaign should start at once.
    importlib.import_module("gomuon.lab.report.writing").write_report(folder)
