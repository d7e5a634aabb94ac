"""Record update-to-weight ratios η‖U‖/‖W‖, and lengths of weights, at rates a sweep has picked.

    python -m tools.update_ratios [FOLDER] [UPDATES]

Trains the paper's character model on Penn Treebank with each method of the sweep in
results/tune-ptb that this package has, at the rate and momentum it picked, for the first half of
its 200 updates, in which the rate is at least half of its peak. Writes ratios.json into the folder
(results/watch): the least, the median and the largest of all layers, from update 10 on. The length
is ‖W‖/√rank, the root mean square of the singular values. `optimizer.doctor()` compares with these.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gomuon.lab import machine
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import make_folder, write_json
from gomuon.lab.running.session import Session
from gomuon.optimizer import MatrixOptimizer
from gomuon.watching.records import weight_length

FOLDER = Path("results") / "watch"
SWEEP = Path("results") / "tune-ptb" / "selection.json"
STEPS, SEED, EVERY = 200, 101, 10  # the sweep used seed 100


def ratios(method: str, chosen: dict[str, Any], updates: int) -> dict[str, Any] | None:
    """The ratios of one method's run; None for an optimizer of another package."""
    options = {} if chosen["momentum"] is None else {"momentum": chosen["momentum"]}
    config = RunConfig(
        task="ptb", optimizer=method, lr=chosen["rate"], seed=SEED, steps=STEPS, options=options
    )
    session = Session(config)
    if not isinstance(session.optimizer, MatrixOptimizer):
        return None
    watch = session.optimizer.watch(every=EVERY, spectra=10 * STEPS)
    losses = [session.update(step)[0]["loss"] for step in range(1, updates + 1)]
    records = list(watch)
    return {
        "rate": chosen["rate"],
        "ratio": _spread([record.update_ratio or 0.0 for record in records]),
        "length": _spread([weight_length(record) or 0.0 for record in records]),
        "records": len(records),
        "loss": [losses[0], statistics.fmean(losses[-EVERY:])],
    }


def _spread(numbers: list[float]) -> list[float]:
    """The least, the median and the largest."""
    return [min(numbers), statistics.median(numbers), max(numbers)]


def span(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """From the smallest median of a method to the largest number of all."""
    return {
        name: [min(x[name][1] for x in found.values()), max(x[name][2] for x in found.values())]
        for name in ("ratio", "length")
    }


def main(folder: str = str(FOLDER), updates: str = str(STEPS // 2)) -> None:
    """Train, print and write the file."""
    sweep = json.loads(SWEEP.read_text())
    found: dict[str, Any] = {}
    for method, chosen in sweep["methods"].items():
        one = ratios(method, chosen, int(updates))
        if one is not None:
            found[method] = one
            print(f"{method:14}", *(f"{x:.4f}" for x in (*one["ratio"], *one["length"])))
    make_folder(Path(folder))
    setting = {"sweep": SWEEP.as_posix(), "updates": int(updates), "of": STEPS, "seed": SEED}
    facts = {"versions": machine.versions(), "commit": machine.source_commit()}
    write_json(
        Path(folder) / "ratios.json", {"methods": found, "span": span(found), **setting, **facts}
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
