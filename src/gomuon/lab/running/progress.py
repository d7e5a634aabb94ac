"""What a person sees of running runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from gomuon.lab.experiments.plan import Plan, run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running.training import Progress as Update

PLAIN_INTERVAL = 20.0  # seconds between two plain lines of one run


class Display(AbstractContextManager["Display"]):
    """Keeps the count and the pace of all runs; subclasses show them."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.console = console
        self.runs = len(plan.tuning_configs()) + len(plan.arms) * len(plan.seeds)
        self.steps = plan.steps
        self.settled = 0  # runs finished, now or before
        self.made = 0  # updates made by this process's workers
        self.left = self.runs * plan.steps
        self.begun = time.monotonic()
        self.positions: dict[str, int] = {}
        self.starts: dict[str, tuple[int, float]] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def skip(self, config: RunConfig) -> None:
        self.settled += 1
        self.left -= self.steps

    def begin(self, config: RunConfig) -> None:
        return None

    def update(self, config: RunConfig, update: Update) -> None:
        name = run_name(config)
        if not self.positions:
            # The pace is counted from the first update: importing torch is no part of it.
            self.begun = time.monotonic() - update.seconds
        if name not in self.positions:
            # The first report of a continued run: what lies behind it was made earlier.
            self.left -= update.step - 1
            self.positions[name] = update.step - 1
            self.starts[name] = (update.step - 1, time.monotonic() - update.seconds)
        self.made += update.step - self.positions[name]
        self.left -= update.step - self.positions[name]
        self.positions[name] = update.step

    def finish(self, config: RunConfig) -> None:
        self.settled += 1

    def note(self, text: str) -> None:
        """Say something that is no run's progress and should stay on the screen."""
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def run_eta(self, config: RunConfig) -> float | None:
        name = run_name(config)
        first, begun = self.starts[name]
        done = self.positions[name] - first
        return (time.monotonic() - begun) / done * (config.steps - self.positions[name])

    def eta(self) -> float | None:
        if self.made == 0:
            return None
        return (time.monotonic() - self.begun) / self.made * self.left


class PlainDisplay(Display):
    """One line now and then, for files, pipes and continuous integration."""

    def __init__(self, plan: Plan, console: Console) -> None:
        super().__init__(plan, console)
        self.printed: dict[str, float] = {}
        self.latest: dict[str, dict[str, Any]] = {}

    def skip(self, config: RunConfig) -> None:
        super().skip(config)
        self._line(config, "finished before")

    def begin(self, config: RunConfig) -> None:
        super().begin(config)
        self.printed[run_name(config)] = time.monotonic()
        self._line(config, "started")

    def update(self, config: RunConfig, update: Update) -> None:
        super().update(config, update)
        name, now = run_name(config), time.monotonic()
        self.latest[name] = update.metrics
        if now - self.printed[name] >= PLAIN_INTERVAL and update.step < config.steps:
            self.printed[name] = now
            rest = f"{update.step}/{config.steps}  {numbers(update.metrics)}"
            self._line(config, f"{rest}  {clock(self.eta())} left")

    def finish(self, config: RunConfig) -> None:
        super().finish(config)
        latest = self.latest.get(run_name(config))
        self._line(config, "finished" + (f"  {numbers(latest)}" if latest else ""))

    def _line(self, config: RunConfig, text: str) -> None:
        self.console.print(
            f"[{self.settled}/{self.runs}] {run_name(config)}  {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


class LiveDisplay(Display):
    """A bar per run under way and one for all of them; a finished run leaves a line behind."""

    def __init__(self, plan: Plan, console: Console) -> None:
        super().__init__(plan, console)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", justify="right", markup=False),
            TextColumn("{task.fields[numbers]}", style="cyan", markup=False),
            TextColumn("{task.fields[eta]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self.rows: dict[str, TaskID] = {}
        self.all = self.progress.add_task(
            "all runs", total=self.runs * self.steps, count="", numbers="", eta=""
        )
        self.latest: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> LiveDisplay:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def skip(self, config: RunConfig) -> None:
        super().skip(config)
        self._leave(config, "finished before", "dim")
        self._refresh()

    def begin(self, config: RunConfig) -> None:
        super().begin(config)
        name = run_name(config)
        self.rows[name] = self.progress.add_task(
            name, total=config.steps, count="starting", numbers="", eta=""
        )
        self._refresh()

    def update(self, config: RunConfig, update: Update) -> None:
        super().update(config, update)
        name = run_name(config)
        self.latest[name] = update.metrics
        self.progress.update(
            self.rows[name],
            completed=update.step,
            count=f"{update.step}/{config.steps}",
            numbers=numbers(update.metrics),
            eta=f"{clock(self.run_eta(config))} left",
        )
        self._refresh()

    def finish(self, config: RunConfig) -> None:
        super().finish(config)
        name = run_name(config)
        self.progress.remove_task(self.rows.pop(name))
        self._leave(config, numbers(self.latest.get(name, {})), "green")
        self._refresh()

    def _leave(self, config: RunConfig, text: str, style: str) -> None:
        self.progress.console.print(
            f"done  {run_name(config)}  {text}", style=style, markup=False, highlight=False
        )

    def _refresh(self) -> None:
        left = self.eta()
        self.progress.update(
            self.all,
            completed=self.runs * self.steps - self.left,
            count=f"{self.settled}/{self.runs} runs",
            eta="" if left is None else f"{clock(left)} left",
        )


def open_display(plan: Plan, console: Console) -> Display:
    """The live display for a terminal, plain lines for everything else."""
    return LiveDisplay(plan, console) if console.is_terminal else PlainDisplay(plan, console)


def numbers(metrics: dict[str, Any]) -> str:
    """The current losses or accuracies of a metrics line, in words."""
    parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    for field, word in (("train_accuracy", "train"), ("test_accuracy", "held out")):
        if field in metrics:
            parts.append(f"{word} {metrics[field]:.1%}")
    return "  ".join(parts)


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "some time"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
