"""Command lines at random in a damaged folder: refused in words or carried out, and nothing else.

A case fails if the command ends in an exception or with an exit code that means neither success nor
a refusal, if it prints a control character, or if it changes a file outside its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from gomuon.lab import cli
from gomuon.lab.bench import growth, workloads
from gomuon.lab.data import corpora
from gomuon.lab.data.downloads import Unavailable
from gomuon.lab.experiments import catalogue
from gomuon.lab.experiments.plan import Arm, run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running import execution
from gomuon.lab.running.training import train
from gomuon.lab.running.workers import RunObserver
from tests.faults.command_lines import WORLD, good_line, line
from tests.faults.command_worlds import damage, template
from tests.lab.helpers.tiny_runs import TEXT, addition_plan

CASES = 300
PATIENCE = 60.0  # seconds


class TooLong(BaseException):
    """Not an Exception: nothing in a command may catch it."""


def case(seed: int, folder: Path) -> str | None:
    """One command line in a world of which up to three things are damaged."""
    generator = random.Random(seed)
    world, outside = folder / "world", folder / "outside"
    (outside / "victims").mkdir(parents=True)
    (outside / "victim.json").write_text('{"victim": 1}\n')
    (outside / "victims" / "metrics.jsonl").write_text("a victim\n")
    with surroundings(folder):
        shutil.copytree(template(), world, copy_function=copied)
        (world / "link").symlink_to(outside / "victim.json")
        (world / "linked").symlink_to(world / "begun", target_is_directory=True)
        # Either the words or what they lead to is mostly right, so that the other one is reached.
        right = generator.random() < 0.5
        arguments = good_line(generator) if right else line(generator)
        for _ in range(generator.choice((1, 1, 2, 3) if right else (0, 0, 1))):
            damage(near(world, arguments, generator), outside, generator)
        before = fingerprint(outside)
        with contextlib.chdir(world):
            code, said = call(arguments)
    told = f"gomuon {[word[:60] for word in arguments]} "
    if code not in (0, 2):
        return f"{told} ended with {code!r}: {said[-1500:]!r}"
    if "Traceback" in said:
        return f"{told} printed a traceback: {said[-1500:]!r}"
    if raw := sorted({c for c in said if unicodedata.category(c) == "Cc" and c not in "\n\t"}):
        return f"{told} printed {raw!r}: {said[-500:]!r}"
    if code and not said.strip():
        return f"{told} was refused without a word"
    if fingerprint(outside) != before:
        return f"{told} changed a file outside its folder"
    return None


def near(world: Path, arguments: list[str], generator: random.Random) -> Path:
    """A folder that the command is about, if it is about one; else the whole world."""
    # By name only: a word such as ../.. must never let damage out of the world.
    named = [world / word for word in arguments if word in WORLD]
    return generator.choice([p for p in named if p.is_dir() and not p.is_symlink()] or [world])


def call(arguments: list[str]) -> tuple[object, str]:
    """The exit code of a command and all it printed."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)

    def too_long(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code: object = cli.main(arguments)
    except SystemExit as stopped:
        code = stopped.code or 0
    except TooLong:
        code = f"no answer within {PATIENCE:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    out.seek(0)
    return code, out.read()


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[None]:
    """No network, no cache, tiny models, and runs in this process, where exceptions are seen."""
    made = addition_plan((Arm("adamw", "AdamW", "adamw", 0.01),), steps=3)
    text = corpora.Source(
        title="A made text",
        path="made/input.txt",
        bytes=len(TEXT),
        sha256=hashlib.sha256(TEXT.encode()).hexdigest(),
        words="nowhere",
        urls=("https://example.invalid/made",),
    )
    tiny = {name: {**shapes, "quick": shapes["tiny"]} for name, shapes in workloads.SHAPES.items()}
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (execution, "run_all", run_here),
            (corpora, "from_url", nothing_there),
            (corpora, "from_wheel", nothing_there),
            (corpora, "CORPORA", {"ptb": text}),
            (corpora, "_cache", lambda: folder / "cache"),
            (catalogue, "EXPERIMENTS", {"made": made}),
            (workloads, "SHAPES", tiny),
            (growth, "SIZES", {**growth.SIZES, "quick": growth.SIZES["tiny"]}),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        environment = {"NO_COLOR": "1", "COLUMNS": "100", "HOME": str(folder / "home")}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        yield


def run_here(
    configs: Sequence[RunConfig], root: Path, *, observer: RunObserver, data_dir: Any, **_: Any
) -> None:
    """As `workers.run_all`, without processes."""
    for config in configs:
        observer.begin(config)
        train(config, root / run_name(config), data_dir=data_dir)
        observer.finish(config)


def nothing_there(*_: object, **__: object) -> bytes:
    raise Unavailable("no network\x1b[31m here")


def copied(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copyfile(source, target)


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
