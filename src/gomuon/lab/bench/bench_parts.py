"""The parts of a benchmark: what is measured as a whole, and its place in the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gomuon.lab.bench import (
    growth,
    measurement,
    operation_shares,
    targets,
    tokens_per_step,
    workloads,
)
from gomuon.lab.bench.all_arms import arms_for, choose
from gomuon.lab.bench.arms import BenchArm
from gomuon.lab.bench.workloads import Size, Workload
from gomuon.lab.errors import LabError
from gomuon.lab.input_checks import require_whole

SECTIONS = ("workloads", "memory", "operations", "tokens", "scaling")


class BenchObserver(Protocol):
    """Is told about the progress of a benchmark."""

    def begin(self, title: str, turns: int) -> None: ...
    def tick(self, arm: str, step: int) -> None: ...
    def skip(self, title: str) -> None: ...


@dataclass(frozen=True)
class BenchmarkSettings:
    """What a benchmark was asked for; empty means all."""

    models: str = ""
    arms: str = ""
    cycles: int | None = None
    size: Size = "full"
    scaling: bool = True
    tokens: bool = True
    compiled: bool = False

    def check(self) -> None:
        """Raise a LabError for settings that cannot be measured, before anything runs."""
        if self.cycles is not None:
            require_whole("--cycles", self.cycles)
        choose(self.arms)
        self.workloads()

    def workloads(self) -> list[Workload]:
        names = [word.strip() for word in self.models.split(",")] if self.models.strip() else []
        for name in names:
            if names.count(name) > 1:
                raise LabError(f"--models names {name!r} twice; give each name once")
        return [workloads.find(name, self.size) for name in names or workloads.NAMES]

    def arms_for(self, workload: str) -> tuple[list[BenchArm], list[BenchArm]]:
        """The arms to measure, and those left out because they take too long on this workload."""
        return arms_for(workload, self.arms, full=self.size == "full", compiled=self.compiled)

    def arms_among(self, names: Sequence[str]) -> list[BenchArm]:
        """The arms of these names that are wanted."""
        return [arm for arm in choose(self.arms, self.compiled) if arm.name in names]


class Part(NamedTuple):
    """Something that is measured as a whole, and its place in the file."""

    section: str
    name: str
    title: str
    turns: int
    measure: Callable[[BenchObserver], dict[str, Any]]


def parts(settings: BenchmarkSettings) -> list[Part]:
    """Everything a benchmark measures, in order."""
    found = []
    for workload in settings.workloads():
        found.append(_training(settings, workload))
        if workload.name == "paper":
            found += [_hooks(settings), _operations(settings)]
            found += [_tokens(settings)] if settings.tokens else []
    if settings.scaling:
        found += [_scaling(settings, axis) for axis in growth.AXES]
    return found


def _training(settings: BenchmarkSettings, workload: Workload) -> Part:
    arms, omitted = settings.arms_for(workload.name)
    steps = workload.window * (settings.cycles or workload.cycles)
    return Part(
        "workloads",
        workload.name,
        workload.title,
        (measurement.WARMUP + steps) * len(arms),
        lambda observer: measurement.measure(workload, arms, steps, observer.tick, omitted),
    )


def _hooks(settings: BenchmarkSettings) -> Part:
    title = "memory of a reuse step, with hooks and without"
    return Part(
        "memory", targets.HOOKS, title, 0, lambda observer: measurement.hook_memory(settings.size)
    )


def _operations(settings: BenchmarkSettings) -> Part:
    arms, _ = settings.arms_for(operation_shares.MODEL)
    steps = operation_shares.WARMUP + workloads.WINDOW
    return Part(
        "operations",
        operation_shares.MODEL,
        "FLOPs by kind, and time in Python",
        (2 * steps + 1) * len(arms),
        lambda observer: operation_shares.measure(settings.size, arms, observer.tick),
    )


def _tokens(settings: BenchmarkSettings) -> Part:
    arms = settings.arms_among(tokens_per_step.ARMS)
    cycles = settings.cycles or 1
    steps = tokens_per_step.WARMUP + workloads.WINDOW * cycles
    return Part(
        "tokens",
        tokens_per_step.MODEL,
        "more tokens per step",
        steps * len(arms) * len(tokens_per_step.SIZES[settings.size]),
        lambda observer: tokens_per_step.measure(settings.size, arms, cycles, observer.tick),
    )


def _scaling(settings: BenchmarkSettings, axis: str) -> Part:
    arms = settings.arms_among(growth.ARMS)
    cycles = settings.cycles or growth.CYCLES
    steps = growth.WARMUP + growth.CYCLE * cycles
    return Part(
        "scaling",
        axis,
        f"scaling with {axis}",
        steps * len(arms) * len(growth.SIZES[settings.size][axis]),
        lambda observer: growth.measure(axis, settings.size, arms, cycles, observer.tick),
    )
