"""The command `gomuon watch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live

from gomuon.integrations.json_lines import read_records
from gomuon.lab.errors import LabError
from gomuon.lab.files import readable_size, write_text
from gomuon.lab.flags import Flag, OptionalPath
from gomuon.lab.input_checks import require_positive
from gomuon.lab.terminal import SafeConsole
from gomuon.lab.watching.layer_views import RunView
from gomuon.lab.watching.watch_page import page as html_page
from gomuon.lab.watching.watch_terminal import screen

PAGE_EVERY = 30.0  # seconds between two pages of a live view: drawing one takes a second or two


def watch(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.jsonl")],
    /,
    page: OptionalPath = None,
    once: Flag = False,
    seconds: float = 2.0,
) -> None:
    """Show live which layers of a run drift, are ill-conditioned, or are starved of rank.

    The file is written by optimizer.watch(to=JsonLinesWriter("RUN.jsonl")). Ctrl-C ends the view.

    Args:
        file: The file with the records.
        page: Write a self-contained HTML page here as well, and again as the run goes on.
        once: Print the view once and end; also done where the output is not a terminal.
        seconds: Time between two looks at the file.
    """
    require_positive("--seconds", seconds)
    console = SafeConsole()
    run = read_run(file)
    if once or not console.is_terminal:
        console.print(screen(run, file))
    if page is not None:
        write_text(page, html_page(run, file))
    if console.is_terminal and not once:
        _follow(run, file, page, seconds, console)
    if page is not None:
        console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)


def read_run(file: Path) -> RunView:
    """The run that a file has records of.

    Raises:
        LabError: there is no such file, it has other content, or no record yet.
    """
    try:
        readable_size(file)
        records = read_records(file)
    except FileNotFoundError:
        raise LabError(
            f"{file} does not exist; it is written by "
            f"optimizer.watch(to=JsonLinesWriter({str(file)!r}))"
        ) from None
    except IsADirectoryError:
        raise LabError(f"{file} is a folder; give the file that JsonLinesWriter writes") from None
    except ValueError as error:
        raise LabError(str(error)) from error
    if not records:
        raise LabError(f"{file} has no record yet; the first one comes after `every` steps")
    return RunView.of(records)


def _follow(run: RunView, file: Path, page: Path | None, seconds: float, console: Console) -> None:
    """Show the run until Ctrl-C; look at the file again and again."""
    seen, drawn = _stamp(file), time.monotonic()
    try:
        with Live(
            screen(run, file, console.height), console=console, screen=False, auto_refresh=False
        ) as live:
            while True:
                time.sleep(seconds)
                if (now := _stamp(file)) == seen:
                    continue
                seen, run = now, read_run(file)
                live.update(screen(run, file, console.height), refresh=True)
                if page is not None and time.monotonic() - drawn > PAGE_EVERY:
                    write_text(page, html_page(run, file))
                    drawn = time.monotonic()
    except KeyboardInterrupt:
        if page is not None:
            write_text(page, html_page(run, file))


def _stamp(file: Path) -> tuple[int, int]:
    """What changes when a file does."""
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns
