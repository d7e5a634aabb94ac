"""Measure one workload: the times of all arms in turn, then their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gomuon.lab.bench import lower_bounds, targets, workloads
from gomuon.lab.bench.arms import BenchArm, CannotTrain, gomuon_optimizer
from gomuon.lab.bench.interleaving import (
    Mean,
    Runner,
    StepTime,
    interleave,
    mean_over_cycles,
    reason,
)
from gomuon.lab.bench.memory import held_bytes, peak_bytes
from gomuon.lab.bench.workloads import Size, Workload

WINDOW = 16  # steps: the longest refresh interval of our arms
WARMUP = 2
ALLOWANCE = 20.0  # seconds
OMITTED = "left out: too slow at this size; name it with --arms to measure it"


def measure(
    workload: Workload,
    arms: Sequence[BenchArm],
    steps: int,
    tick: Callable[[str, int], None],
    omitted: Sequence[BenchArm] = (),
) -> dict[str, Any]:
    """All arms on one workload: times, then memory."""
    try:
        model = workload.make()
    except ImportError as error:
        return {"title": workload.title, "failed": reason(error), "arms": {}}
    runners: dict[str, Runner] = {}
    entries: dict[str, dict[str, Any]] = {}
    for arm in arms:
        entries[arm.name] = _facts(arm)
        copy = workload.make()
        try:
            runners[arm.name] = Runner(copy, arm.build(copy), workload, arm.interval)
        except CannotTrain as unfit:
            entries[arm.name]["failed"] = str(unfit)
        except Exception as error:  # an error of another package must not end the benchmark
            entries[arm.name]["failed"] = reason(error)
    step_times, failed = interleave(
        runners,
        warmup=WARMUP,
        steps=steps,
        allowance=ALLOWANCE,
        exempt=targets.arms_of(workload.name),
        tick=tick,
    )
    for name, why in failed.items():
        entries[name]["failed"] = why
    for name, made in step_times.items():
        entries[name] |= _times(made, runners[name].interval)
        entries[name] |= _bytes(runners[name], workload.peak)
    for arm in omitted:
        entries[arm.name] = {**_facts(arm), "failed": OMITTED}
    kernels = lower_bounds.measure(workload, {name: runners[name] for name in step_times})
    parameters = sum(p.nbytes for p in model.parameters())
    return {
        "title": workload.title,
        "shape": dict(workload.shape),
        "steps": steps,
        "warmup": WARMUP,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_bytes": parameters,
        "bare_peak_bytes": parameters + _bare_peak(workload) if workload.peak else None,
        "kernels": {kind: digits(taken) for kind, taken in kernels.items()},
        "arms": entries,
    }


def _facts(arm: BenchArm) -> dict[str, Any]:
    return {
        "title": arm.title,
        "package": arm.package,
        "interval": arm.interval,
        "note": arm.note,
    }


def _times(step_times: Sequence[StepTime], interval: int) -> dict[str, Any]:
    def over(values: Sequence[float]) -> dict[str, Any]:
        return rounded(mean_over_cycles(values, interval))

    return {
        "forward_backward": over([one.forward_backward for one in step_times]),
        "step": over([one.step for one in step_times]),
        "whole": over([one.whole for one in step_times]),
        "steps": len(step_times),
    }


def rounded(mean: Mean) -> dict[str, Any]:
    error = None if mean.error is None else digits(mean.error)
    return {"value": digits(mean.value), "error": error, "cycles": mean.cycles}


def digits(value: float) -> float:
    return float(f"{value:.5g}")


def _bytes(runner: Runner, peak: bool) -> dict[str, Any]:
    """Bytes of optimizer state, and the peak memory of a step over one cycle."""
    parameters = list(runner.model.parameters())
    buffers = list(runner.model.buffers())
    state = held_bytes(runner.stepper, [*parameters, *buffers])
    if not peak:
        return {"state_bytes": state, "peak_bytes": None}
    steps = runner.interval if runner.interval <= WINDOW else 1
    most = max(peak_bytes(runner.timed_step) for _ in range(steps))
    return {
        "state_bytes": state,
        "peak_bytes": sum(p.nbytes for p in parameters) + state + most,
    }


def _bare_peak(workload: Workload) -> int:
    model = workload.make()

    def passes() -> None:
        model.zero_grad()
        workload.loss(model, workload.batches[0]).backward()

    passes()
    model.zero_grad()
    return peak_bytes(passes)


def hook_memory(size: Size) -> dict[str, Any]:
    """Peak memory of a Go-MUON step without refresh, with its hooks and without them.

    Measured for forward and backward alone, and for the whole step; the larger ratio counts.
    """
    workload = workloads.find("paper", size)
    model = workload.make()
    optimizer: Any = gomuon_optimizer("GoMuon", refresh_every=WINDOW)(model)
    runner = Runner(model, optimizer, workload)
    runner.timed_step()  # the refresh
    runner.timed_step()

    def passes() -> None:
        optimizer.zero_grad()
        workload.loss(model, workload.batches[0]).backward()

    def peaks() -> tuple[int, int]:
        return peak_bytes(passes), peak_bytes(runner.timed_step)

    inside = peaks()
    optimizer.remove_hooks()
    outside = peaks()
    ratios = [a / b for a, b in zip(inside, outside, strict=True)]
    return {
        "forward_backward_bytes": [inside[0], outside[0]],
        "step_bytes": [inside[1], outside[1]],
        "ratio": max(ratios),
    }
