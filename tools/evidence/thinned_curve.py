"""``curve.json``: a run's curve in a few kB, as means over blocks of ten updates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import read_json, write_atomically
from gomuon.lab.input_checks import BAD_VALUE_ERRORS

CURVE = "curve.json"
FORMAT = 1
BLOCK = 10  # updates per point
# An accuracy of n pairs is at least 1/(100 n) away from 99 %, so six decimals keep the side it
# lies on for every n below 20,000; the loss is only drawn and averaged.
LOSS_DECIMALS, ACCURACY_DECIMALS = 5, 6


@dataclass(frozen=True)
class Curve:
    """A thinned curve.

    Attributes:
        updates: how many the run made.
        loss: mean pre-update training loss of each block, the last of which may be shorter.
        train: training accuracy at the end of each full block; empty for character models.
        test: held-out accuracy at every evaluation; empty for character models.
        evaluate_every: updates from one evaluation to the next.
    """

    updates: int
    loss: tuple[float, ...]
    train: tuple[float, ...] = ()
    test: tuple[float, ...] = ()
    evaluate_every: int = BLOCK

    @property
    def ends(self) -> list[int]:
        """The last update of every block."""
        return [min((i + 1) * BLOCK, self.updates) for i in range(len(self.loss))]

    @property
    def train_points(self) -> list[tuple[int, float]]:
        return [((i + 1) * BLOCK, value) for i, value in enumerate(self.train)]

    @property
    def test_points(self) -> list[tuple[int, float]]:
        return [((i + 1) * self.evaluate_every, value) for i, value in enumerate(self.test)]

    def mean(self, first: int, last: int) -> float | None:
        """Mean loss of updates first to last; None where blocks do not end there."""
        if (first - 1) % BLOCK or last % BLOCK or last > self.updates:
            return None
        blocks = self.loss[(first - 1) // BLOCK : last // BLOCK]
        return math.fsum(blocks) / len(blocks)


def thin(metrics: Sequence[Mapping[str, Any]], config: RunConfig) -> Curve:
    """The curve of a run from its metrics, one line per update."""
    losses = [float(line["loss"]) for line in metrics]
    blocks = [losses[i : i + BLOCK] for i in range(0, len(losses), BLOCK)]
    accuracies = metrics[BLOCK - 1 :: BLOCK] if config.task == "grokking" else []
    evaluations = [line for line in metrics if "test_accuracy" in line]
    return Curve(
        updates=len(losses),
        loss=tuple(round(math.fsum(b) / len(b), LOSS_DECIMALS) for b in blocks),
        train=tuple(round(float(x["train_accuracy"]), ACCURACY_DECIMALS) for x in accuracies),
        test=tuple(round(float(x["test_accuracy"]), ACCURACY_DECIMALS) for x in evaluations),
        evaluate_every=config.evaluate_every,
    )


def write_curve(folder: Path, curve: Curve) -> None:
    """Write ``curve.json``, a line for each list: an indented one is twice the size."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "block": BLOCK,
        "updates": curve.updates,
        "loss": list(curve.loss),
    }
    if curve.test:
        values |= {
            "train_accuracy": list(curve.train),
            "test_accuracy": list(curve.test),
            "evaluate_every": curve.evaluate_every,
        }
    lines = (
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in values.items()
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_atomically(folder / CURVE, lambda part: part.write_text(text, encoding="utf-8"))


def read_curve(folder: Path) -> Curve | None:
    """The curve beside a run's result; None where there is none.

    Raises:
        LabError: the file is no such curve.
    """
    path = folder / CURVE
    if not path.is_file():
        return None
    content = read_json(path)
    if (content.get("format"), content.get("block")) != (FORMAT, BLOCK):
        raise LabError(
            f"{path}: format {content.get('format')!r} with blocks of {content.get('block')!r}; "
            f"this gomuon reads format {FORMAT} with blocks of {BLOCK}; collect the campaign again"
        )
    try:
        curve = Curve(
            updates=int(content["updates"]),
            loss=tuple(float(value) for value in content["loss"]),
            train=tuple(float(value) for value in content.get("train_accuracy", ())),
            test=tuple(float(value) for value in content.get("test_accuracy", ())),
            evaluate_every=int(content.get("evaluate_every", BLOCK)),
        )
    except BAD_VALUE_ERRORS as error:
        raise LabError(f"{path}: not a thinned curve ({error!r}); collect it again") from error
    if len(curve.loss) != math.ceil(curve.updates / BLOCK):
        raise LabError(
            f"{path}: {len(curve.loss)} blocks of {BLOCK} updates cannot be "
            f"{curve.updates} updates; collect the campaign again"
        )
    return curve
