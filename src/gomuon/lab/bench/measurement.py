"""Measure one workload: the times of all arms in turn, then their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gomuon.lab.bench import lower_bounds, targets, workloads
from gomuon.lab.bench.arms import BenchArm, gomuon_optimizer
from gomuon.lab.bench.interleaving import (
    Mean,
    Runner,
    StepTime,
    interleave,
    mean_over_cycles,
    reason,
)
from gomuon.lab.bench.memory import held_bytes, peak_bytes
from gomuon.lab.bench.runners import build_runners
from gomuon.lab.bench.workloads import LONGEST, WINDOW, Size, Workload

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
    entries: dict[str, dict[str, Any]] = {arm.name: _facts(arm) for arm in (*arms, *omitted)}
    runners, unfit = build_runners(arms, workload)
    needed = targets.arms_of(workload.name)
    step_times, failed = interleave(
        runners,
        warmup=WARMUP,
        steps=steps,
        allowance=ALLOWANCE,
        exempt=needed,
        tick=tick,
    )
    left_out = {arm.name: OMITTED for arm in omitted}
    for name, why in {**unfit, **failed, **left_out}.items():
        entries[name]["failed"] = why
    for name, runner in runners.items():
        entries[name]["interval"] = runner.interval
    for name, made in step_times.items():
        entries[name] |= _times(made, runners[name].interval)
        entries[name] |= _bytes(runners[name], workload.peak)
    timed = {name: runners[name] for name in step_times if name in needed}
    kernels = lower_bounds.measure(workload, timed)
    parameters = sum(p.nbytes for p in model.parameters())
    return {
        "title": workload.title,
        "shape": dict(workload.shape),
        "steps": steps,
        "warmup": WARMUP,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_bytes": parameters,
        "bare_peak_bytes": parameters + _bare_peak(workload) if workload.peak else None,
        "kernels": {
            name: {kind: digits(taken) for kind, taken in seconds.items()}
            for name, seconds in kernels.items()
        },
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
    steps = runner.interval if runner.interval <= LONGEST else 1
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
