"""Time several arms in one process: each makes its first step, then each its second, and so on.

A slow moment of the machine then affects all arms alike, and the ratios of their times stay.
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


class StepTime(NamedTuple):
    """Seconds of one step of training."""

    forward_backward: float
    step: float

    @property
    def whole(self) -> float:
        return self.forward_backward + self.step


@dataclass
class Runner:
    """One arm with its own copy of a model."""

    model: nn.Module
    stepper: Stepper
    workload: Workload
    interval: int = 1
    clock: Clock = time.perf_counter
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # Computed once: it would take longer than the shortest steps.
        self.queued = any(p.device.type != "cpu" for p in self.model.parameters())

    def timed_step(self) -> StepTime:
        """Time forward and backward, then the optimizer's step; drop the gradients."""
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
            parameter.grad = None  # frees memory while the other arms make their step
        return StepTime(middle - begun, ended - middle)

    def _wait(self) -> None:
        if self.queued:
            torch.accelerator.synchronize()


class Mean(NamedTuple):
    """A mean over whole refresh cycles.

    Attributes:
        value: the mean.
        error: its standard error, relative; None when there was a single cycle.
        cycles: their number; 0 when there are fewer steps than a whole cycle.
    """

    value: float
    error: float | None
    cycles: int


def mean_over_cycles(values: Sequence[float], interval: int) -> Mean:
    """The mean over the last whole refresh cycles; over all values if there is no whole cycle."""
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
    """The order of the arms at a step: the first one changes, and every other step is reversed."""
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
) -> tuple[dict[str, list[StepTime]], dict[str, str]]:
    """Time `steps` steps of all runners in turn.

    Args:
        runners: the arms by name.
        warmup: steps at the start that are not measured.
        steps: measured steps.
        allowance: seconds of measured time after which an arm stops, once it has a whole cycle, so
            that a very slow arm does not take up the whole benchmark.
        exempt: arms that make all steps, however long they take.
        tick: called with the arm and the step before each step.

    Returns:
        The times of every arm, and for each arm that failed the reason.
    """
    step_times: dict[str, list[StepTime]] = {name: [] for name in runners}
    failed: dict[str, str] = {}
    active = list(runners)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection would slow down one arm only
    try:
        for step in range(warmup + steps):
            for name in turns(active, step) if active else ():
                tick(name, step)
                try:
                    one = runners[name].timed_step()
                except Exception as error:  # an error of another package must not end the benchmark
                    failed[name] = reason(error)
                    continue
                if step >= warmup:
                    step_times[name].append(one)
            active = [
                name
                for name in active
                if name not in failed
                and not (name not in exempt and _spent(step_times[name], runners[name], allowance))
            ]
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return {name: made for name, made in step_times.items() if name not in failed}, failed


def _spent(step_times: Sequence[StepTime], runner: Runner, allowance: float) -> bool:
    return (
        len(step_times) >= runner.interval
        and math.fsum(one.whole for one in step_times) > allowance
    )


def reason(error: Exception) -> str:
    """An error as one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
