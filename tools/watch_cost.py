"""Measure what watching costs, as ratios of whole steps within one interleaved run.

    python -m tools.watch_cost [FOLDER] [WINDOWS]

Copies of the paper's model train in turn with Go-MUON at K = 4: one that was never watched, one
whose watch was removed, and two that are watched every ten steps, with a layer's spectra in every
sixth of its records (the default) and in every one. A window is 60 steps: 15 refreshes, and every
layer's spectra once. Prints the ratios and writes watch.json into the folder (results/watch).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gomuon import GoMuon
from gomuon.lab import machine
from gomuon.lab.bench import workloads
from gomuon.lab.bench.interleaving import Runner, StepTime, interleave
from gomuon.lab.bench.workloads import Size
from gomuon.lab.files import make_folder, write_json

FOLDER = Path("results") / "watch"
EVERY, WINDOW = 10, 60
BARS = {"removed": 1.01, "every 10": 1.05}
ARMS: dict[str, Callable[[GoMuon], Any]] = {
    "never": lambda optimizer: None,
    "removed": lambda optimizer: optimizer.watch(EVERY).remove(),
    "every 10": lambda optimizer: optimizer.watch(EVERY, to=_nowhere),
    "every 10, all spectra": lambda optimizer: optimizer.watch(EVERY, to=_nowhere, spectra=1),
}


def _nowhere(records: Any) -> None:
    """Writing is not measured."""


def measure(size: Size = "full", windows: int = 5) -> dict[str, dict[str, Any]]:
    """Ratios of whole steps over those that were never watched, with standard errors."""
    workload = workloads.find("paper", size)
    runners = {}
    for name, start in ARMS.items():
        model = workload.make()
        optimizer = GoMuon(model)
        start(optimizer)
        runners[name] = Runner(model, optimizer, workload)
    times, _ = interleave(runners, warmup=EVERY, steps=WINDOW * windows)
    cycles = {name: _windows(steps) for name, steps in times.items()}
    return {name: _compared(cycles[name], cycles["never"]) for name in ARMS if name != "never"}


def _windows(steps: list[StepTime]) -> list[list[float]]:
    """Seconds of every step, window by window. Steps in one place do the same work."""
    whole = [one.whole for one in steps]
    return [whole[i : i + WINDOW] for i in range(0, len(whole), WINDOW)]


def _compared(one: list[list[float]], other: list[list[float]]) -> dict[str, Any]:
    """The ratio of usual windows, and its standard error by leaving out one window at a time."""
    count = len(one)
    ratio = _usual(one) / _usual(other)
    without = [
        _usual([*one[:i], *one[i + 1 :]]) / _usual([*other[:i], *other[i + 1 :]])
        for i in range(count)
        if count > 1
    ]
    mean = math.fsum(without) / max(1, len(without))
    spread = math.fsum((x - mean) ** 2 for x in without) * (count - 1) / count
    return {"ratio": round(ratio, 4), "error": round(math.sqrt(spread), 4), "windows": count}


def _usual(windows: list[list[float]]) -> float:
    """Seconds of a window whose every step takes its median time, so that a stall hardly counts."""
    return math.fsum(statistics.median(place) for place in zip(*windows, strict=True))


def main(folder: str = str(FOLDER), windows: str = "5") -> None:
    """Measure, print and write the file."""
    found = measure(windows=int(windows))
    for name, one in found.items():
        bar = f", at most {BARS[name]}" if name in BARS else ""
        print(f"{name}: {one['ratio']:.3f} ± {one['error']:.3f}{bar}")
    make_folder(Path(folder))
    facts = {"versions": machine.versions(), "machine": machine.facts()}
    result = {"ratios": found, "every": EVERY, "steps": WINDOW, "bars": BARS, **facts}
    write_json(Path(folder) / "watch.json", {**result, "commit": machine.source_commit()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
