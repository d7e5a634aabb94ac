"""Measure what it costs to capture products of functions instead of linear layers.

    python -m tools.capture_cost [FOLDER] [CYCLES]

Two copies of the paper's model train in turn with Go-MUON at K = 4. In one of them the weights
belong to `nn.Linear`, where hooks capture; in the other `F.linear` multiplies with the same
weights, where a function mode does. Prints the ratios of whole steps that refresh and of steps that
reuse the geometry, and writes times.json into the folder (results/function-capture).
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.lab import machine
from gomuon.lab.bench import workloads
from gomuon.lab.bench.interleaving import Runner, interleave
from gomuon.lab.bench.workloads import Size
from gomuon.lab.files import make_folder, write_json
from gomuon.parameters.routing import Treatment

FOLDER = Path("results") / "function-capture"
INTERVAL = 4


class Product(nn.Module):
    """A linear layer that gomuon does not know as one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def as_functions(model: nn.Module) -> nn.Module:
    """A copy of the model whose linear layers are replaced."""
    changed = copy.deepcopy(model)
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Product(nn.Parameter(child.weight.detach())))
    return changed


def routes(model: nn.Module) -> dict[str, Treatment]:
    """Functions do not say which weights are matrices, so this does."""
    products = (name for name, module in model.named_modules() if isinstance(module, Product))
    return {f"{name}.weight": "matrix" for name in products}


def measure(size: Size = "full", cycles: int = 60) -> dict[str, dict[str, Any]]:
    """Ratios functions/hooks of whole steps, by kind of step, with their standard errors."""
    workload = workloads.find("paper", size)
    model = workload.make()
    runners = {}
    for name, own in {"hooks": copy.deepcopy(model), "functions": as_functions(model)}.items():
        optimizer = GoMuon(own, refresh_every=INTERVAL, routes=routes(own))
        runners[name] = Runner(own, optimizer, workload, INTERVAL)
    times, _ = interleave(runners, warmup=INTERVAL, steps=INTERVAL * cycles)
    pairs = zip(times["functions"], times["hooks"], strict=True)
    ratios = [math.log(ours.whole / theirs.whole) for ours, theirs in pairs]
    refreshes = ratios[::INTERVAL]
    reuses = [one for step, one in enumerate(ratios) if step % INTERVAL]
    return {"refresh": _summary(refreshes), "reuse": _summary(reuses)}


def _summary(logs: list[float]) -> dict[str, Any]:
    """The geometric mean of ratios, and its standard error as a share."""
    mean = math.fsum(logs) / len(logs)
    spread = math.fsum((one - mean) ** 2 for one in logs) / max(1, len(logs) - 1)
    return {
        "ratio": round(math.exp(mean), 4),
        "error": round(math.sqrt(spread / len(logs)), 4),
        "steps": len(logs),
    }


def main(folder: str = str(FOLDER), cycles: str = "60") -> None:
    """Measure, print and write the file."""
    found = measure(cycles=int(cycles))
    for kind, one in found.items():
        print(f"{kind}: functions / hooks {one['ratio']:.3f} ± {one['error']:.3f}")
    make_folder(Path(folder))
    facts = {"versions": machine.versions(), "machine": machine.facts()}
    write_json(Path(folder) / "times.json", {**found, **facts, "commit": machine.source_commit()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
