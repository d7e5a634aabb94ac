"""How the time of a step grows with width and depth: the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gomuon.lab.bench.arms import BenchArm
from gomuon.lab.bench.interleaving import Runner, interleave, mean_over_cycles
from gomuon.lab.bench.runners import build_runner
from gomuon.lab.bench.workloads import Size, Workload, transformer

AXES = ("width", "depth")
ARMS = ("adamw", "newton-schulz", "muon", "go-muon-4")
SIZES: dict[Size, dict[str, tuple[int, ...]]] = {
    "full": {"width": (128, 256, 512, 1024), "depth": (3, 6, 12, 24)},
    "quick": {"width": (32, 64, 128), "depth": (1, 2, 4)},
    "tiny": {"width": (8, 16), "depth": (1, 2)},
}
BASE: dict[Size, int] = {"full": 128, "quick": 64, "tiny": 8}  # the width at which depth grows
HEAD: dict[Size, int] = {"full": 32, "quick": 16, "tiny": 4}
WARMUP = 1
CYCLE = 4  # of Go-MUON with K = 4, the only arm here that refreshes
CYCLES = 3
ALLOWANCE = 5.0  # seconds; large matrices take longer and get one cycle


def workload(axis: str, value: int, size: Size) -> Workload:
    """The paper's architecture with one layer (for width) or one width (for depth), few tokens."""
    width, layers = (value, 1) if axis == "width" else (BASE[size], value)
    shape = {"width": width, "layers": layers, "heads": width // HEAD[size], "hidden": 3 * width}
    tokens = {"vocabulary": 50, "batch": 2, "length": 64 if size == "full" else 16}
    return transformer(f"{axis}-{value}", f"{axis} {value}", {**shape, **tokens})


def measure(
    axis: str,
    size: Size,
    arms: Sequence[BenchArm],
    cycles: int,
    tick: Callable[[str, int], None],
) -> dict[str, Any]:
    """Measure all arms at all sizes of an axis, interleaved in one run."""
    sizes = SIZES[size][axis]
    runners: dict[str, Runner] = {}
    for value in sizes:
        work = workload(axis, value, size)
        for arm in arms:
            runner = runners[f"{arm.name}@{value}"] = build_runner(arm, work)
            runner.interval = CYCLE  # all make as many steps before their allowance counts
    step_times, failed = interleave(
        runners, warmup=WARMUP, steps=CYCLE * cycles, allowance=ALLOWANCE, tick=tick
    )
    found: dict[str, Any] = {}
    for arm in arms:
        keys = [f"{arm.name}@{value}" for value in sizes]
        if bad := [failed[key] for key in keys if key in failed]:
            found[arm.name] = {"title": arm.title, "failed": bad[0]}
            continue
        means = [mean_over_cycles([one.step for one in step_times[key]], CYCLE) for key in keys]
        seconds = dict(zip(sizes, (mean.value for mean in means), strict=True))
        exponent, error = power_law(seconds)
        found[arm.name] = {
            "title": arm.title,
            "step": [float(f"{value:.5g}") for value in seconds.values()],
            "exponent": exponent,
            "error": error,
        }
    return {"sizes": list(sizes), "arms": found}


def power_law(points: Mapping[int, float]) -> tuple[float, float | None]:
    """The exponent of seconds ~ size^exponent by least squares, and its standard error."""
    xs = [math.log(size) for size in points]
    ys = [math.log(seconds) for seconds in points.values()]
    n = len(xs)
    x, y = math.fsum(xs) / n, math.fsum(ys) / n
    square = math.fsum((a - x) ** 2 for a in xs)
    slope = math.fsum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / square
    if n < 3:
        return slope, None
    rest = math.fsum((b - y - slope * (a - x)) ** 2 for a, b in zip(xs, ys, strict=True))
    return slope, math.sqrt(rest / (n - 2) / square)
