"""The command `gomuon bench`."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as Rich
from rich.text import Text

from gomuon.lab.bench import bench_tables, benchmark, further_tables
from gomuon.lab.bench import speed_page as pages
from gomuon.lab.bench.bench_parts import BenchmarkSettings
from gomuon.lab.errors import Interrupted
from gomuon.lab.files import write_text
from gomuon.lab.flags import Flag, OptionalInt, OptionalPath, OptionalText
from gomuon.lab.formatting import duration
from gomuon.lab.input_checks import errors_naming, require_whole
from gomuon.lab.machine import on_threads
from gomuon.lab.report.document import Table, cell
from gomuon.lab.terminal import SafeConsole, escaped

REPORT = "report.md"
TARGETS = "targets"  # the folder beside a benchmark's with the run that judges the targets
LINE_INTERVAL = 20.0  # seconds between two lines where the output is not a terminal


def bench(
    models: OptionalText = "",
    arms: OptionalText = "",
    cycles: OptionalInt = None,
    quick: Flag = False,
    scaling: Flag = True,
    tokens: Flag = True,
    compile: Flag = False,
    threads: OptionalInt = None,
    fresh: Flag = False,
    page: Flag = False,
    out: OptionalPath = None,
) -> None:
    """Measure step time and memory next to other packages, as ratios within one interleaved run.

    Writes bench.json, report.md and a plot. You can stop it at any time: the same command continues
    after the last part that was finished.

    Args:
        models: Names separated by commas: paper, wide, mlp, gpt2, conv, resnet, mlp-2048, overhead.
            Default: all.
        arms: Such as go-muon-4,torch-muon. Default: all on paper, on the other models fewer.
        cycles: Windows of 16 measured steps per model. Default: the model's own number.
        quick: Smaller models, one or two minutes; no verdicts.
        scaling: Do not measure how the time grows with width and depth.
        tokens: Do not measure the paper's model with more and with fewer tokens per step.
        compile: Let heavyball compile its steps, as it does by default.
        threads: Threads of torch. Default: torch's own number.
        fresh: Delete the results in the folder and measure everything again; needed if they come
            from another machine, other versions, other threads or other code.
        page: Print docs/speed.md from the results in the folder; measure nothing.
        out: Folder of the results. Default: runs/bench (runs/bench-quick); with --page
            results/bench.
    """
    if page:
        folder = out or Path("results") / "bench"
        link = f"../{folder.as_posix()}/bench"
        file = (folder / benchmark.FILE).as_posix()
        with errors_naming(folder / benchmark.FILE):
            text = pages.markdown(benchmark.read_results(folder), file, link, judged_beside(folder))
        sys.stdout.write(escaped(text))
        return
    if threads is not None:
        require_whole("--threads", threads)
    settings = BenchmarkSettings(
        models, arms, cycles, "quick" if quick else "full", scaling, tokens, compile
    )
    settings.check()
    folder = out or Path("runs") / ("bench-quick" if quick else "bench")
    console = SafeConsole()
    try:
        with on_threads(threads or torch.get_num_threads()), BenchProgress(console) as progress:
            command = spelled(settings, threads, out)
            result = benchmark.run_benchmark(settings, folder, command, progress, fresh=fresh)
    except KeyboardInterrupt:
        raise Interrupted("finished parts are kept, the current part starts again") from None
    with errors_naming(folder / benchmark.FILE):
        show(result, console)
        write(result, folder)
    console.print(f"report: {folder / REPORT}", markup=False, highlight=False, soft_wrap=True)


def judged_beside(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """The file of the run that judges the targets, and its content, if it is beside a benchmark."""
    path = folder.with_name(TARGETS) / benchmark.FILE
    if not path.exists():
        return None
    with errors_naming(path):
        return path.as_posix(), benchmark.read_results(path.parent)


def spelled(settings: BenchmarkSettings, threads: int | None, out: Path | None) -> str:
    """The command that measures this; without absolute folders, which exist on one machine only."""
    words = ["gomuon", "bench"]
    if out is not None and not out.is_absolute():
        words += ["--out", out.as_posix()]
    options = {"--models": settings.models, "--arms": settings.arms, "--threads": threads}
    for flag, value in {**options, "--cycles": settings.cycles}.items():
        words += [flag, str(value)] if value else []
    switches = {
        "--quick": settings.size != "full",
        "--no-scaling": not settings.scaling,
        "--no-tokens": not settings.tokens,
        "--compile": settings.compiled,
    }
    return shlex.join([*words, *(flag for flag, on in switches.items() if on)])


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Write the report and the plot next to a benchmark's file."""
    # Imported late: matplotlib takes a while, and a long benchmark should start at once.
    importlib.import_module("gomuon.lab.bench.plot").write(result, folder)
    text = pages.markdown(result, benchmark.FILE, "bench")
    write_text(folder / REPORT, text)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables; the targets come last, so that they are still on the screen."""
    for title, table in bench_tables.workload_tables(result):
        console.print(_rich(title, table))
    for title, table in further_tables.titled(result):
        console.print(_rich(title, table))
    console.print(_rich("targets", bench_tables.target_table(result)))
    console.print("times over forward + backward of the model without hooks", style="dim")


def _rich(title: str, table: Table) -> Rich:
    shown = Rich(title=title, caption=table.caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(table.columns):
        side = "left" if index < table.left else "right"
        shown.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        texts = [Text(c.text, style="bold" if c.best else "") for c in map(cell, row)]
        shown.add_row(*texts)
    return shown


class BenchProgress:
    """One line that is updated in a terminal; elsewhere a new line every 20 seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("")
        self.title, self.turns, self.made = "", 0, 0
        self.begun = self.said = time.monotonic()

    def __enter__(self) -> BenchProgress:
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.status.stop()

    def begin(self, title: str, turns: int) -> None:
        self.title, self.turns, self.made = title, turns, 0
        self.begun = self.said = time.monotonic()
        self._line(title)

    def tick(self, arm: str, step: int) -> None:
        now = time.monotonic()
        left = (now - self.begun) / self.made * (self.turns - self.made) if self.made else None
        self.made += 1
        text = f"{self.title}: {self.made}/{self.turns}, {arm}, {duration(left)} left"
        if self.console.is_terminal:
            self.status.update(Text(text))
        elif now - self.said > LINE_INTERVAL:
            self.said = now
            self._line(text)

    def skip(self, title: str) -> None:
        self._line(f"{title}: measured before")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
