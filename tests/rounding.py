"""What each method makes of rounding: whole batches against two halves, 30 steps in float64.

`python -m tests.rounding` measures it and writes results/rounding/rounding.json.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gomuon.lab.machine import facts, versions
from tests.capture.test_accumulation import batches, in_halves_and_whole, loss_of
from tests.methods.table import RECIPES

RESULTS = Path("results/rounding/rounding.json")
STEPS = 30
# With their own defaults, and where those amplify rounding, with the setting that does not; and
# KL-Shampoo from small eigenvalues, where it does.
METHODS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in dict.fromkeys(name for name, _ in RECIPES)),
    ("Mousse", {"epsilon": 1e-5}),
    ("Shampoo", {"lr": 1e-4}),
    ("QSD", {"scale": 10.0}),
    ("KLShampoo", {"first_values": 1e-6}),
]


def apart(method: str, settings: dict[str, Any]) -> tuple[float, float]:
    """The largest difference of a weight and that of the loss, after all steps."""
    parts, whole = in_halves_and_whole(method, STEPS, **settings)
    pairs = zip(parts.parameters(), whole.parameters(), strict=True)
    weights = torch.stack([(p - q).detach().abs().max() for p, q in pairs])
    losses: list[Tensor] = [loss_of(m, batches((6,), STEPS)[0], "mean") for m in (parts, whole)]
    return float(weights.max()), abs(float((losses[0] - losses[1]).detach()))


def main() -> None:
    """Measure, print and keep."""
    warnings.simplefilter("ignore")
    found = []
    for method, settings in METHODS:
        weight, loss = apart(method, settings)
        found.append({"method": method, "settings": settings, "weight": weight, "loss": loss})
        print(f"{method} {settings or ''}: weights {weight:.0e}, loss {loss:.0e}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    kept = {"steps": STEPS, "apart": found, "machine": facts(), "versions": versions()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
