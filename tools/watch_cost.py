"""Measure what watching costs, as ratios of whole steps within one interleaved run.

    python -m tools.watch_cost [FOLDER] [WINDOWS]

Copies of the paper's model train in turn with Go-MUON at K = 4: one that was never watched, one
whose watch was removed, and two that are watched every ten steps, with a layer's spectra in every
sixth of its records (the default) and in every one. A window is 60 steps: 15 refreshes, and every
layer's spectra once. Prints the ratios and writes watch.json into the folder (results/watch).
"""

from __future__ import annotations

import math
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
from tools.capture_cost import summary

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
    sums = {name: _sums(steps) for name, steps in times.items()}
    return {
        name: summary(
            [math.log(a / b) for a, b in zip(sums[name], sums["never"], strict=True)], "windows"
        )
        for name in ARMS
        if name != "never"
    }


def _sums(steps: list[StepTime]) -> list[float]:
    """Seconds of every window."""
    whole = [one.whole for one in steps]
    return [math.fsum(whole[i : i + WINDOW]) for i in range(0, len(whole), WINDOW)]


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
