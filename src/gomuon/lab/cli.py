"""The commands: race, reproduce, report and data."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from gomuon.lab import campaign, corpora, experiments, machine, racing, summary, timing
from gomuon.lab.display import open_display
from gomuon.lab.errors import LabError
from gomuon.lab.plans import Plan, adapt
from gomuon.lab.workers import Crashed, Interrupted

app = tyro.extras.SubcommandApp()

# Options left open: their help says what then happens, which "default: None" would not.
_OPEN = tyro.conf.arg(help_behavior_hint="")
Whole = Annotated[int | None, _OPEN]
Number = Annotated[float | None, _OPEN]
Folder = Annotated[Path | None, _OPEN]
Switch = Annotated[bool, _OPEN]


@app.command
def race(
    task: str = "grokking",
    optimizers: str = "go-muon,muon,adamw",
    lr: Annotated[str, _OPEN] = "",
    seeds: str = "0",
    steps: Whole = None,
    adamw_lr: Number = None,
    width: Whole = None,
    layers: Whole = None,
    heads: Whole = None,
    hidden: Whole = None,
    modulus: Whole = None,
    length: Whole = None,
    batch: Whole = None,
    jobs: Whole = None,
    threads: Whole = None,
    data_dir: Folder = None,
    out: Folder = None,
) -> None:
    """Race optimizers against each other from the same start on the same data.

    Without arguments: Go-MUON, Muon and AdamW learn modular addition, which takes two or three
    minutes on two cores and downloads nothing. Stopped at any moment, the same command continues.

    Args:
        task: What to learn: grokking (modular addition), ptb or shakespeare (characters).
        optimizers: Names separated by commas; the first is compared with each of the others.
        lr: Peak matrix rates, such as go-muon=.08,muon=.16; the others keep their defaults.
        seeds: Such as 0,1,2 or 0-2; every seed pairs all optimizers.
        steps: Updates per run; by default the task's own number.
        adamw_lr: Peak rate of embeddings, norms and vectors; 1e-2 for grokking, else 3e-3.
        width: Width of the transformer; 64 for grokking, else 128.
        layers: Number of its layers; 3.
        heads: Attention heads per layer; 4.
        hidden: Width of its SwiGLU; 192 for grokking, else 384.
        modulus: The p of modular addition; 59.
        length: Characters per window; 128.
        batch: Windows per update; 16.
        jobs: Runs side by side; by default one per core.
        threads: Threads per run; by default the cores shared out among the jobs.
        data_dir: Folder with the corpora; by default GOMUON_DATA, then the cache, then download.
        out: Folder of the campaign; by default runs/race-TASK.
    """
    plan = racing.race_plan(
        task,
        optimizers,
        rates=lr,
        seeds=seeds,
        steps=steps,
        adamw_lr=adamw_lr,
        width=width,
        layers=layers,
        heads=heads,
        hidden=hidden,
        modulus=modulus,
        length=length,
        batch=batch,
    )
    folder = out or Path("runs") / f"race-{task}"
    jobs, threads = share(len(plan.arms) * len(plan.seeds), jobs, threads, folder)
    carry_out(adapt(plan, threads=threads), folder, jobs, data_dir)


@app.command
def reproduce(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    /,
    seeds: Annotated[str | None, _OPEN] = None,
    steps: Whole = None,
    quick: Switch = False,
    dry_run: Switch = False,
    jobs: Whole = None,
    threads: Whole = None,
    data_dir: Folder = None,
    out: Folder = None,
) -> None:
    """Repeat an experiment of the paper and set its figures beside your own.

    The plan (arms, seeds, windows, statistic, rule) is written down before anything runs. Stopped
    at any moment, the same command continues; finished runs are never repeated.

    Args:
        name: ptb, shakespeare, grokking, mapback, lazy, or all of them.
        seeds: Instead of the declared ones, such as 0,1 or 17402-17404.
        steps: Updates per run; fewer than declared labels every result as quick.
        quick: A version of a few minutes, labelled as such everywhere.
        dry_run: Print the plan and a time estimate from a few real updates; run nothing.
        jobs: Runs side by side; by default one per core.
        threads: Threads per run; by default the cores shared out among the jobs.
        data_dir: Folder with the corpora; by default GOMUON_DATA, then the cache, then download.
        out: Folder of the campaign; by default runs/NAME (runs/NAME-quick).
    """
    plans = list(experiments.EXPERIMENTS.values()) if name == "all" else [experiments.find(name)]
    chosen = None if seeds is None else racing.parse_seeds(seeds)
    for declared in plans:
        plan = adapt(declared, quick=quick, seeds=chosen, steps=steps)
        suffix = "-quick" if plan.label == "quick" else ""
        folder = Path("runs") / f"{plan.experiment}{suffix}" if out is None else out
        if out is not None and name == "all":
            folder = out / plan.experiment
        runs = len(plan.tuning_configs()) + len(plan.arms) * len(plan.seeds)
        parallel, each = share(runs, jobs, threads, folder)
        plan = adapt(declared, quick=quick, seeds=chosen, steps=steps, threads=each)
        if dry_run:
            campaign.check(plan, data_dir)
            costs = timing.estimate(plan, parallel, data_dir)
            summary.print_plan(plan, costs, parallel, Console())
        else:
            carry_out(plan, folder, parallel, data_dir)


@app.command
def report(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")], /) -> None:
    """Write report.md and the self-contained report.html of a campaign or run folder.

    Args:
        folder: A folder that race or reproduce wrote.
    """
    write_report(folder)
    Console().print(f"{folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


@app.command
def data(
    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[NAME …]", help_behavior_hint=""),
    ] = (),
    /,
    fetch: Switch = False,
    data_dir: Folder = None,
) -> None:
    """Show which corpora are present, and fetch those that are not.

    Args:
        names: ptb, shakespeare; naming a corpus fetches it if it is missing.
        fetch: Fetch every corpus that is missing.
        data_dir: Folder with the corpora; by default GOMUON_DATA, then the cache, then download.
    """
    for name in names:
        corpora.source_of(name)
    console = Console()
    wanted = list(names) or (list(corpora.CORPORA) if fetch else [])
    trouble: LabError | None = None
    try:
        if wanted:
            corpora.fetch(wanted, data_dir)
    except LabError as error:
        trouble = error  # the table first: it shows what did arrive
    table = Table()
    for head in ("corpus", "file", "bytes", "state", "where"):
        table.add_column(head, justify="right" if head == "bytes" else "left", overflow="fold")
    for entry in corpora.status(data_dir):
        where = str(entry.path) if entry.state == "present" else entry.detail
        table.add_row(entry.name, entry.file, f"{entry.bytes:,}", entry.state, where)
    console.print(table, markup=False)
    if trouble is not None:
        raise trouble


def share(runs: int, jobs: int | None, threads: int | None, folder: Path) -> tuple[int, int]:
    """How many runs at a time and how many threads each.

    A campaign keeps the threads it was begun with, because its numbers depend on them.
    """
    for name, value in (("jobs", jobs), ("threads", threads)):
        if value is not None and value < 1:
            raise LabError(f"--{name} must be at least 1, not {value}")
    parallel = jobs or min(machine.cores(), runs)
    each = threads or campaign.recorded_threads(folder) or max(1, machine.cores() // parallel)
    return parallel, each


def carry_out(plan: Plan, folder: Path, jobs: int, data_dir: Path | None) -> None:
    """Run a plan with its display, print its table, write its report."""
    console = Console()
    console.print(plan.title, style="bold", markup=False, highlight=False)
    with open_display(plan, console) as display:
        runs = campaign.run_campaign(plan, folder, jobs=jobs, watcher=display, data_dir=data_dir)
    summary.print_summary(plan, runs, console)
    write_report(folder)
    console.print(
        f"report: {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True
    )


def write_report(folder: Path) -> None:
    # Imported late: matplotlib takes a while, and a long campaign should start at once.
    importlib.import_module("gomuon.lab.report").write_report(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a user's error and 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app.cli(
            args=arguments or ["--help"],
            prog="gomuon",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            description="Go-MUON's lab: race optimizers, repeat the paper, read the reports.",
        )
    except LabError as error:
        print(f"gomuon: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Interrupted):
        again = shlex.join(["gomuon", *arguments])
        print(f"\nstopped; nothing is lost, continue with: {again}", file=sys.stderr)
        return 130
    except Crashed as error:
        print(f"gomuon: {error}", file=sys.stderr)
        return 1
    return 0
