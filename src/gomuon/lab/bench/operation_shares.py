"""What an optimizer adds to forward and backward: FLOPs by kind and dtype, and time in Python.

FLOPs are counted by recording real steps over one refresh cycle, less those of the model without
an optimizer. Time in Python is estimated by the step of the same model with very narrow matrices:
it calls the same operations as often, and they have next to nothing to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gomuon.lab.bench.arms import BenchArm
from gomuon.lab.bench.interleaving import Runner, interleave, mean_over_cycles, reason
from gomuon.lab.bench.measurement import digits
from gomuon.lab.bench.runners import build_runners
from gomuon.lab.bench.workloads import LONGEST, SHAPES, WINDOW, Size, Workload, find, transformer
from gomuon.lab.costs.recorder import OperationRecorder, RecordedOperation
from gomuon.lab.machine import on_threads

MODEL = "paper"
DTYPES = ("float64", "float32", "bfloat16")
DECOMPOSITIONS = "decompositions"
WARMUP = 2
ALLOWANCE = 20.0  # seconds
HEAD = 2  # width of a head in the narrow model: the least that rotary positions can turn


def narrow(size: Size) -> Workload:
    """The model with as many layers of the same kinds, and very narrow ones."""
    shape = SHAPES[MODEL][size]
    width = HEAD * shape["heads"]
    small = {**shape, "width": width, "hidden": 3 * width, "batch": 2, "length": 16}
    return transformer("narrow", f"width {width}", small)


def measure(
    size: Size, arms: Sequence[BenchArm], tick: Callable[[str, int], None]
) -> dict[str, Any]:
    """FLOPs and time in Python of all arms on the paper's model."""
    workload = find(MODEL, size)
    wide, unfit = build_runners(arms, workload)
    thin, _ = build_runners([arm for arm in arms if arm.name in wide], narrow(size))
    entries: dict[str, dict[str, Any]] = {arm.name: {"title": arm.title} for arm in arms}
    for name, why in unfit.items():
        entries[name]["failed"] = why
    for name, share in _python_shares(wide, thin, tick).items():
        entries[name]["python"] = share
    bare = _bare_flops(workload)
    for name, runner in wide.items():
        tick(name, 0)
        try:
            entries[name] |= flops_shares(runner, bare)
        except Exception as error:  # an error of another package must not end the benchmark
            entries[name]["failed"] = reason(error)
    return {"shape": dict(workload.shape), "arms": entries}


# ---- time ----------------------------------------------------------------------------------------


def _python_shares(
    wide: dict[str, Runner], thin: dict[str, Runner], tick: Callable[[str, int], None]
) -> dict[str, float]:
    """Time of the narrow model's step over that of the model's own, measured in turn."""
    both = {**wide, **{f"{name}, narrow": runner for name, runner in thin.items()}}
    step_times, _ = interleave(both, warmup=WARMUP, steps=WINDOW, allowance=ALLOWANCE, tick=tick)
    shares = {}
    for name, runner in wide.items():
        pair = (step_times.get(name), step_times.get(f"{name}, narrow"))
        own, other = (
            None
            if made is None
            else mean_over_cycles([one.step for one in made], runner.interval).value
            for made in pair
        )
        if own and other:
            shares[name] = digits(other / own)
    return shares


# ---- FLOPs ---------------------------------------------------------------------------------------


def flops_shares(runner: Runner, bare: Counter[str]) -> dict[str, Any]:
    """FLOPs a step adds, over those of the passes, and the shares of their kinds.

    Of one cycle, or of some steps where a cycle is too long.
    """
    steps = runner.interval if runner.interval <= LONGEST else WINDOW
    runner.timed_step()
    with on_threads(1), OperationRecorder() as record:
        for _ in range(steps):
            runner.timed_step()
    added = counted(record.operations)
    added.subtract({kind: steps * flops for kind, flops in bare.items()})
    total = added.total() - added[DECOMPOSITIONS]
    passes = steps * (bare.total() - bare[DECOMPOSITIONS])
    shares = {kind: digits(added[kind] / total) for kind in (DECOMPOSITIONS, *DTYPES) if total}
    return {"flops": digits(total / passes), "cycle": steps == runner.interval, "shares": shares}


def counted(operations: Iterable[RecordedOperation]) -> Counter[str]:
    """FLOPs by dtype, and those of decompositions among them once more."""
    flops: Counter[str] = Counter()
    for operation in operations:
        if operation.flops:
            flops[str(operation.dtype).removeprefix("torch.")] += operation.flops
            flops[DECOMPOSITIONS] += operation.flops if operation.decomposition else 0
    return flops


def _bare_flops(workload: Workload) -> Counter[str]:
    model = workload.make()
    with on_threads(1), OperationRecorder() as record:
        workload.loss(model, workload.batches[0]).backward()
    return counted(record.operations)
