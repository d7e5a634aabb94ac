"""The commands: race, tune, reproduce, report, data, methods, bench, plan, verify, watch."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

import gomuon
from gomuon.lab.bench.command import bench
from gomuon.lab.campaign_commands import ARGV, race, reproduce, tune, write_report
from gomuon.lab.costs.command import plan
from gomuon.lab.data import corpora
from gomuon.lab.errors import Crashed, Interrupted, LabError, unknown_name
from gomuon.lab.experiments.own_methods import take_imports
from gomuon.lab.flags import NO_DEFAULT_SHOWN, Flag, OptionalPath, refuse_empty
from gomuon.lab.report import methods_page, terminal_methods
from gomuon.lab.terminal import CLOSED_PIPE, SafeConsole, escaped, one_line, reader_is_gone
from gomuon.lab.verification.command import verify
from gomuon.lab.watching.command import watch

app = tyro.extras.SubcommandApp()
app.command(race)
app.command(tune)
app.command(reproduce)


@app.command
def report(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")], /) -> None:
    """Write report.md and the self-contained report.html of a campaign or run folder.

    Args:
        folder: A folder written by race, tune or reproduce.
    """
    write_report(folder)
    SafeConsole().print(f"{folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


@app.command
def data(
    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[NAME …]", help_behavior_hint=""),
    ] = (),
    /,
    fetch: Flag = False,
    data_dir: OptionalPath = None,
) -> None:
    """Show which corpora are present; download missing ones by name, or all with --fetch.

    Args:
        names: ptb, ptb-valid, shakespeare; these are downloaded if they are missing.
        fetch: Download every corpus that is missing.
        data_dir: Folder with the corpora. Default: GOMUON_DATA, else the cache, else download.
    """
    for name in names:
        corpora.source_of(name)
    console = SafeConsole()
    wanted = list(names) or (list(corpora.CORPORA) if fetch else [])
    failure: LabError | None = None
    try:
        if wanted:
            corpora.fetch(wanted, data_dir)
    except LabError as error:
        failure = error  # print the table first: it shows what was downloaded
    table = Table()
    for head in ("corpus", "file", "bytes", "state", "where"):
        table.add_column(head, justify="right" if head == "bytes" else "left", overflow="fold")
    for entry in corpora.status(data_dir):
        where = str(entry.path) if entry.state == "present" else entry.detail
        table.add_row(entry.name, entry.file, f"{entry.bytes:,}", entry.state, where)
    console.print(table, markup=False)
    if failure is not None:
        raise failure


@app.command
def methods(
    name: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]"), NO_DEFAULT_SHOWN
    ] = "",
    /,
    markdown: Flag = False,
) -> None:
    """Compare the methods: geometry, update formula, refresh interval, learning rate and origin.

    Args:
        name: Show one method with its formula, defaults and description.
        markdown: Print docs/methods.md, which has all of this.
    """
    if markdown:
        sys.stdout.write(methods_page.markdown())
    elif name:
        terminal_methods.print_method(name, SafeConsole())
    else:
        terminal_methods.print_table(SafeConsole())


app.command(bench)
app.command(plan)
app.command(verify)
app.command(watch)
COMMANDS = (race, tune, reproduce, report, data, methods, bench, plan, verify, watch)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a user's error and 130 after Ctrl-C.

    It is 141 if what reads the output has ended, such as `head`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    ARGV.set(tuple(arguments))
    try:
        refuse_empty(arguments)
        words = take_imports(arguments) or ["--help"]
        if words == ["--version"]:
            print(f"gomuon {gomuon.__version__}")
        else:
            check_command(words[0])
            dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        # What is still buffered goes nowhere, so that Python says nothing when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except LabError as error:
        print(f"gomuon: {one_line(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        # From the disk, such as a name that is too long or a folder without permission.
        where = "" if error.filename is None else f"{error.filename}: "
        print(one_line(f"gomuon: {where}{error.strerror or error}"), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Interrupted) as stopped:
        # Continuing with --fresh would delete what is kept.
        again = shlex.join(["gomuon", *(word for word in arguments if word != "--fresh")])
        kept = str(stopped) or "nothing is lost"
        print(f"\nstopped; {kept}, continue with: {escaped(again)}", file=sys.stderr)
        return 130
    except Crashed as error:
        print(escaped(f"gomuon: {error}"), file=sys.stderr)
        return 1
    return 0


def check_command(word: str) -> None:
    """Refuse a command that does not exist, with the nearest one that does."""
    names = [command.__name__ for command in COMMANDS]
    if not word.startswith("-") and word not in names:
        raise unknown_name("command", word, names)


def dispatch(arguments: list[str]) -> None:
    """Parse and run; the parser's messages repeat the arguments, so these are escaped first."""
    shown = [escaped(word) for word in arguments]
    plain = shown == arguments

    def call(words: list[str], outputs: bool) -> None:
        app.cli(
            args=words,
            prog="gomuon",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            description=(
                "Go-MUON's lab: race optimizers, repeat the paper, plan costs. Before a command, "
                "--import FILE adds methods of your own; docs/methods.md says how to write one."
            ),
            console_outputs=outputs,
        )

    try:
        call(arguments, outputs=plain)
    except SystemExit:
        if not plain:
            call(shown, outputs=True)
        raise
