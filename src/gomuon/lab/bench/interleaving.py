"""Taking turns: every arm makes one step, then every arm the next, in one process.

What a machine's drift or its neighbours do to one arm they so do to all, and ratios stay.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from gomuon.lab.bench.arms import Stepper
from gomuon.lab.bench.workloads import Workload
from gomuon.lab.errors import LabError

Clock = Callable[[], float]


class Lap(NamedTuple):
    """Seconds of one step of training."""

    forward_backward: float
    step: float

    @property
    def whole(self) -> float:
        return self.forward_backward + self.step


@dataclass
class Runner:
    """One arm on its own copy of a model."""

    model: nn.Module
    stepper: Stepper
    workload: Workload
    interval: int = 1
    clock: Clock = time.perf_counter
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # Asked once: it would cost more than the smallest of the steps.
        self.queued = any(p.device.type != "cpu" for p in self.model.parameters())

    def lap(self) -> Lap:
        """Forward, backward and the optimizer's step, timed apart; gradients are then dropped."""
        batch = self.workload.batches[self.made % len(self.workload.batches)]
        begun = self.clock()
        self.stepper.zero_grad()
        self.workload.loss(self.model, batch).backward()
        self._wait()
        middle = self.clock()
        self.stepper.step()
        self._wait()
        ended = self.clock()
        self.made += 1
        for parameter in self.model.parameters():
            parameter.grad = None  # while the others take their turns
        return Lap(middle - begun, ended - middle)

    def _wait(self) -> None:
        if self.queued:
            torch.accelerator.synchronize()


class Mean(NamedTuple):
    """A mean over whole refresh cycles.

    Attributes:
        value: the mean.
        error: its standard error, relative; None when there was a single cycle.
        cycles: how many there were; 0 when the window holds no whole one.
    """

    value: float
    error: float | None
    cycles: int


def mean_over_cycles(values: Sequence[float], interval: int) -> Mean:
    """The mean over the last whole refresh cycles; over everything if there is none."""
    if not values:
        raise LabError("nothing was measured; give at least one cycle")
    cycles = len(values) // interval
    if cycles == 0:
        return Mean(math.fsum(values) / len(values), None, 0)
    kept = values[len(values) - cycles * interval :]
    means = [math.fsum(kept[i : i + interval]) / interval for i in range(0, len(kept), interval)]
    mean = math.fsum(means) / cycles
    if cycles == 1 or mean <= 0:
        return Mean(mean, None, cycles)
    variance = math.fsum((x - mean) ** 2 for x in means) / (cycles - 1)
    return Mean(mean, math.sqrt(variance / cycles) / mean, cycles)


def turns(names: Sequence[str], step: int) -> list[str]:
    """Who goes when: another one goes first every time, and neighbours change sides."""
    first = step // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if step % 2 else order


def interleave(
    runners: Mapping[str, Runner],
    *,
    warmup: int,
    steps: int,
    allowance: float = math.inf,
    exempt: Collection[str] = (),
    tick: Callable[[str, int], None] = lambda name, step: None,
) -> tuple[dict[str, list[Lap]], dict[str, str]]:
    """Let all runners make `steps` measured steps in turn.

    Args:
        runners: the arms by name.
        warmup: steps at the start that are not measured.
        steps: measured steps.
        allowance: seconds after which an arm that has had a whole cycle sits out, so that a very
            slow one does not use up everybody's time.
        exempt: arms that make all steps whatever they take.
        tick: told the arm and the step before each turn.

    Returns:
        The laps of every arm, and the reasons of those that failed.
    """
    laps: dict[str, list[Lap]] = {name: [] for name in runners}
    failed: dict[str, str] = {}
    active = list(runners)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection would fall on whoever is at work
    try:
        for step in range(warmup + steps):
            for name in turns(active, step) if active else ():
                tick(name, step)
                try:
                    lap = runners[name].lap()
                except Exception as error:  # another package's fault must not end the run
                    failed[name] = reason(error)
                    continue
                if step >= warmup:
                    laps[name].append(lap)
            active = [
                name
                for name in active
                if name not in failed
                and not (name not in exempt and _spent(laps[name], runners[name], allowance))
            ]
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return {name: made for name, made in laps.items() if name not in failed}, failed


def _spent(laps: Sequence[Lap], runner: Runner, allowance: float) -> bool:
    return len(laps) >= runner.interval and math.fsum(lap.whole for lap in laps) > allowance


def reason(error: Exception) -> str:
    """An error as one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
