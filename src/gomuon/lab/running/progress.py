"""The progress of a campaign: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from gomuon.lab.experiments.plan import Plan, run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.formatting import duration
from gomuon.lab.running.training import UpdateReport

PLAIN_INTERVAL = 20.0  # seconds between two plain lines of one run
WIDE = 100  # columns that a live line with everything takes


class Pace:
    """Counts finished runs and updates, and estimates the time that is left."""

    def __init__(self, plan: Plan) -> None:
        self.runs = len(plan.tuning_configs()) + len(plan.arms) * len(plan.seeds)
        self.steps = plan.steps
        self.finished = 0  # runs, in this process or before
        self.made = 0  # updates made by this process's workers
        self.left = self.runs * plan.steps
        self.begun = time.monotonic()
        self.positions: dict[str, int] = {}
        self.starts: dict[str, tuple[int, float]] = {}

    def skip(self) -> None:
        """A run was finished before."""
        self.finished += 1
        self.left -= self.steps

    def update(self, config: RunConfig, report: UpdateReport) -> None:
        """A run has made updates up to ``report.step``."""
        name = run_name(config)
        if not self.positions:
            # Counted from the first update: the time to import torch is no part of the pace.
            self.begun = time.monotonic() - report.seconds
        if name not in self.positions:
            # The first report of a continued run: earlier updates were made before.
            self.left -= report.step - 1
            self.positions[name] = report.step - 1
            self.starts[name] = (report.step - 1, time.monotonic() - report.seconds)
        self.made += report.step - self.positions[name]
        self.left -= report.step - self.positions[name]
        self.positions[name] = report.step

    def finish(self) -> None:
        """A run has just finished."""
        self.finished += 1

    def seconds_left_of(self, config: RunConfig) -> float:
        name = run_name(config)
        first, begun = self.starts[name]
        done = self.positions[name] - first
        return (time.monotonic() - begun) / done * (config.steps - self.positions[name])

    def seconds_left(self) -> float | None:
        """Of the whole campaign; None before the first update."""
        if self.made == 0:
            return None
        return (time.monotonic() - self.begun) / self.made * self.left


class PlainDisplay:
    """A line now and then, for files, pipes and continuous integration."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.console = console
        self.pace = Pace(plan)
        self.printed: dict[str, float] = {}
        self.latest: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def skip(self, config: RunConfig) -> None:
        self.pace.skip()
        self._line(config, "finished before")

    def begin(self, config: RunConfig) -> None:
        self.printed[run_name(config)] = time.monotonic()
        self._line(config, "started")

    def update(self, config: RunConfig, report: UpdateReport) -> None:
        self.pace.update(config, report)
        name, now = run_name(config), time.monotonic()
        self.latest[name] = report.metrics
        if now - self.printed[name] >= PLAIN_INTERVAL and report.step < config.steps:
            self.printed[name] = now
            rest = f"{report.step}/{config.steps}  {metrics_text(report.metrics)}"
            self._line(config, f"{rest}  {duration(self.pace.seconds_left())} left")

    def finish(self, config: RunConfig) -> None:
        self.pace.finish()
        latest = self.latest.get(run_name(config))
        self._line(config, "finished" + (f"  {metrics_text(latest)}" if latest else ""))

    def note(self, text: str) -> None:
        print_note(self.console, text)

    def _line(self, config: RunConfig, text: str) -> None:
        self.console.print(
            f"[{self.pace.finished}/{self.pace.runs}] {run_name(config)}  {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


class LiveDisplay:
    """A bar for each running run and one for all runs; a finished run leaves a line.

    In a narrow terminal bars are short and only the most important figure is shown, so that no
    column is cut off.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        self.console = console
        self.pace = Pace(plan)
        self.is_narrow = console.width < WIDE
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=6 if self.is_narrow else 24),
            TextColumn("{task.fields[count]}", justify="right", markup=False),
            TextColumn("{task.fields[metrics]}", style="cyan", markup=False),
            TextColumn("{task.fields[eta]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self.bars: dict[str, TaskID] = {}
        self.all_runs = self.progress.add_task(
            "all runs", total=self.pace.left, count="", metrics="", eta=""
        )
        self.latest: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def skip(self, config: RunConfig) -> None:
        self.pace.skip()
        self._line(config, "finished before", "dim")
        self._refresh()

    def begin(self, config: RunConfig) -> None:
        name = run_name(config)
        self.bars[name] = self.progress.add_task(
            name, total=config.steps, count="starting", metrics="", eta=""
        )
        self._refresh()

    def update(self, config: RunConfig, report: UpdateReport) -> None:
        self.pace.update(config, report)
        name = run_name(config)
        self.latest[name] = report.metrics
        self.progress.update(
            self.bars[name],
            completed=report.step,
            count=f"{report.step}/{config.steps}",
            metrics=metrics_text(report.metrics, short=self.is_narrow),
            eta=self._left(self.pace.seconds_left_of(config)),
        )
        self._refresh()

    def finish(self, config: RunConfig) -> None:
        self.pace.finish()
        name = run_name(config)
        self.progress.remove_task(self.bars.pop(name))
        self._line(config, metrics_text(self.latest.get(name, {})), "green")
        self._refresh()

    def note(self, text: str) -> None:
        print_note(self.console, text)

    def _line(self, config: RunConfig, text: str, style: str) -> None:
        self.progress.console.print(
            f"done  {run_name(config)}  {text}", style=style, markup=False, highlight=False
        )

    def _refresh(self) -> None:
        pace, left = self.pace, self.pace.seconds_left()
        self.progress.update(
            self.all_runs,
            completed=pace.runs * pace.steps - pace.left,
            count=f"{pace.finished}/{pace.runs} runs",
            eta="" if left is None else self._left(left),
        )

    def _left(self, seconds: float) -> str:
        return duration(seconds) if self.is_narrow else f"{duration(seconds)} left"


def open_display(plan: Plan, console: Console) -> PlainDisplay | LiveDisplay:
    """The live display for a terminal, plain lines for everything else."""
    return LiveDisplay(plan, console) if console.is_terminal else PlainDisplay(plan, console)


def print_note(console: Console, text: str) -> None:
    """Print a message that belongs to no run's progress and stays on the screen."""
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def metrics_text(metrics: dict[str, Any], *, short: bool = False) -> str:
    """The current loss and accuracies of a metrics line, in words; one of them if it is short."""
    if short and "test_accuracy" in metrics:
        return f"held out {metrics['test_accuracy']:.0%}"
    if short:
        return f"loss {metrics['loss']:.3f}" if "loss" in metrics else ""
    parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    for field, word in (("train_accuracy", "train"), ("test_accuracy", "held out")):
        if field in metrics:
            parts.append(f"{word} {metrics[field]:.1%}")
    return "  ".join(parts)
