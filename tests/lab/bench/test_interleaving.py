"""Steps in turn and means over whole cycles, with a fake clock."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gomuon.lab.bench.interleaving import Runner, interleave, mean_over_cycles, turns
from gomuon.lab.bench.workloads import Workload
from gomuon.lab.errors import LabError


class Clock:
    """Time that passes only when someone works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now


class Worker:
    """An optimizer whose steps take the seconds they are told to, in turn."""

    def __init__(self, clock: Clock, name: str, *seconds: float) -> None:
        self.clock, self.name, self.seconds, self.made = clock, name, seconds, 0

    def step(self) -> None:
        self.clock.log.append(self.name)
        self.clock.now += self.seconds[self.made % len(self.seconds)]
        self.made += 1

    def zero_grad(self) -> None:
        pass


def runner(clock: Clock, worker: Worker, interval: int = 1, passes: float = 10.0) -> Runner:
    model = nn.Linear(2, 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        clock.now += passes
        out: Tensor = model(batch[0])
        return out.sum()

    batches = ((torch.ones(3, 2), torch.ones(3)),)
    work = Workload("made", "made", lambda: model, batches, loss, {})
    return Runner(model, worker, work, interval, clock)


def test_a_timed_step_tells_the_passes_from_the_step_and_drops_gradients() -> None:
    clock = Clock()
    one = runner(clock, Worker(clock, "one", 3.0))
    time = one.timed_step()
    assert (time.forward_backward, time.step, time.whole) == (10.0, 3.0, 13.0)
    assert all(p.grad is None for p in one.model.parameters())


def test_warmup_is_not_measured_and_everyone_makes_every_step() -> None:
    clock = Clock()
    workers = {"a": Worker(clock, "a", 100.0, *[1.0] * 9), "b": Worker(clock, "b", 2.0)}
    runners = {name: runner(clock, worker) for name, worker in workers.items()}
    step_times, failed = interleave(runners, warmup=1, steps=4)
    assert [one.step for one in step_times["a"]] == [1.0] * 4
    assert [one.step for one in step_times["b"]] == [2.0] * 4
    assert not failed
    rounds = [clock.log[i : i + 2] for i in range(0, len(clock.log), 2)]
    assert all(sorted(names) == ["a", "b"] for names in rounds), "step by step, not arm by arm"


def test_nobody_always_goes_first_or_after_the_same_one() -> None:
    names = ["a", "b", "c", "d"]
    orders = [turns(names, step) for step in range(8)]
    assert {order[0] for order in orders} == set(names)
    before = {(x, y) for order in orders for x, y in pairwise(order)}
    assert all((x, y) in before and (y, x) in before for x, y in before)


def test_a_mean_covers_whole_cycles_only() -> None:
    # A refresh of 9 every fourth step; the first two steps do not fill a cycle.
    values = [1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    mean = mean_over_cycles(values, 4)
    assert mean == (3.0, 0.0, 2)
    assert mean_over_cycles([2.0, 4.0, 6.0], 1).error == pytest.approx(2 / math.sqrt(3) / 4)
    assert mean_over_cycles([2.0, 4.0], 2) == (3.0, None, 1)
    assert mean_over_cycles([2.0, 4.0], 1000) == (3.0, None, 0), "no whole cycle, and it says so"
    with pytest.raises(LabError, match="nothing was measured"):
        mean_over_cycles([], 1)


def test_one_that_fails_leaves_with_its_reason_and_the_rest_goes_on() -> None:
    clock = Clock()

    class Broken(Worker):
        def step(self) -> None:
            super().step()
            if self.made == 3:
                raise RuntimeError("no such\noperator")

    runners = {
        "good": runner(clock, Worker(clock, "good", 1.0)),
        "bad": runner(clock, Broken(clock, "bad", 1.0)),
    }
    step_times, failed = interleave(runners, warmup=1, steps=4)
    assert failed == {"bad": "RuntimeError: no such operator"}
    assert list(step_times) == ["good"]
    assert len(step_times["good"]) == 4


def test_a_slow_one_sits_out_after_a_whole_cycle_unless_exempt() -> None:
    clock = Clock()
    names = ("quick", "slow", "slow, K = 4", "slow but exempt")
    intervals = (1, 1, 4, 1)
    runners = {
        name: runner(clock, Worker(clock, name, 1.0 if name == "quick" else 50.0), interval)
        for name, interval in zip(names, intervals, strict=True)
    }
    step_times, _ = interleave(
        runners, warmup=1, steps=8, allowance=100.0, exempt=["slow but exempt"]
    )
    assert [len(step_times[name]) for name in names] == [8, 2, 4, 8]
