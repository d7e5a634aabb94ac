"""Tiny models, plans and corpora shared by the lab's tests."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.data import corpora
from gomuon.lab.experiments.plan import Arm, Plan, Quick
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results.runs import METRICS
from gomuon.lab.running.training import UpdateReport
from gomuon.lab.running.workers import PRELOAD

TEXT = "the quick brown fox jumps over the lazy dog\n" * 30
SHAPE: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "hidden": 8}
ADDITION: dict[str, Any] = {**SHAPE, "modulus": 5, "checkpoint_every": 3}


def addition(**changes: Any) -> RunConfig:
    """A modular-addition run that takes milliseconds."""
    facts: dict[str, Any] = {
        "task": "grokking",
        "optimizer": "adamw",
        "lr": 0.01,
        "seed": 0,
        "steps": 12,
        "arm": "made",
        **ADDITION,
    }
    return RunConfig(**facts | changes)


def characters(**changes: Any) -> RunConfig:
    """A character-model run on the made corpus."""
    facts: dict[str, Any] = {"task": "ptb", "length": 8, "batch": 2, "steps": 10, "modulus": 0}
    return addition(**facts | changes)


def addition_plan(arms: tuple[Arm, ...], seeds: tuple[int, ...] = (0,), **changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "experiment": "made",
        "title": "A made campaign",
        "task": "grokking",
        "arms": arms,
        "seeds": seeds,
        "steps": 12,
        "statistic": "grok step",
        "rule": "none",
        "quick": Quick(steps=6, seeds=1),
        "settings": ADDITION,
    }
    return Plan(**facts | changes)


def corpus_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = TEXT, name: str = "ptb"
) -> Path:
    """Put a made text where a corpus is looked for; the data folder to pass on."""
    content = text.encode()
    source = corpora.Source(
        title="A made text",
        path="made/input.txt",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        words="nowhere",
        urls=(),
    )
    monkeypatch.setitem(corpora.CORPORA, name, source)
    path = folder / source.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return folder


def forking() -> Any:
    """Processes forked from one server that has imported torch, which is dear, but not used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "gomuon.lab.running.execution"])
    return context


class Silent:
    """An observer that only remembers."""

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.finished: list[str] = []
        self.notes: list[str] = []

    def skip(self, config: RunConfig) -> None:
        self.skipped.append(f"{config.arm}-s{config.seed}")

    def begin(self, config: RunConfig) -> None: ...

    def update(self, config: RunConfig, progress: UpdateReport) -> None: ...

    def finish(self, config: RunConfig) -> None:
        self.finished.append(f"{config.arm}-s{config.seed}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def stop_after(count: int) -> Any:
    """Say yes from the given call on: a Ctrl-C at a chosen update."""
    calls = iter(range(10**9))
    return lambda: next(calls) >= count


def metrics_of(folder: Path) -> bytes:
    return (folder / METRICS).read_bytes()
