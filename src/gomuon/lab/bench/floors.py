"""The least a step can take: its products and decompositions alone, shared evenly among the cores.

No elementwise work, no memory beyond the caches, no thread that waits for another. What a bar asks
for below that, no arrangement of the same operations gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.costs import captured, map_work, maps_work, moment_work, units_of
from gomuon.inventory import inventory, readings
from gomuon.lab.bench.workloads import Workload
from gomuon.operations import Operation, Product, Work, polar_work

Seconds = Mapping[str, float]  # of one core, by kind of work
REPEATS, ENOUGH = 5, 0.5  # the best of so many, or of as many as fit into so many seconds


def measure(workload: Workload) -> dict[str, float]:
    """Seconds of one core for each kind of work of Go-MUON, every distinct operation timed once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        known: dict[tuple[object, ...], float] = {}
        return {
            kind: _seconds(work, dtype, known) for kind, (work, dtype) in parts(workload).items()
        }
    finally:
        torch.set_num_threads(threads)


def parts(workload: Workload) -> dict[str, tuple[Work, torch.dtype]]:
    """What a step multiplies and decomposes, and in which precision."""
    model, settings = workload.make(), {**GoMuon.recipe.defaults, "polar": "gram"}
    seen = readings(_Trained(model, workload), torch.empty(0))
    layers = inventory(model, GoMuon.recipe, settings, seen).layers
    work: dict[str, Work] = {"polar": [], "maps": [], "roots": [], "moments": []}
    for unit in units_of(layers, "GoMuon"):
        for layer in unit:
            work["polar"] += polar_work(layer.blocks, layer.m, layer.n, "gram")
            work["maps"] += 2 * maps_work(layer, *captured(layer, "GoMuon", settings))
        work["roots"] += map_work(unit, "GoMuon", settings)
        work["moments"] += moment_work(unit, "GoMuon", settings)
    single = {kind: (found, torch.float32) for kind, found in work.items()}
    return {**single, "polar": (work["polar"], torch.float64)}


def least(seconds: Seconds, arm: str, quantity: str, threads: int) -> float | None:
    """Seconds of Muon's or Go-MUON's step, or what hooks and step add to the passes of a whole one.

    None for other arms and quantities.
    """
    if quantity not in ("step", "whole"):
        return None
    if arm == "muon":
        return seconds["polar"] / threads
    name, _, interval = arm.rpartition("-")
    if name != "go-muon":
        return None
    renewed = seconds["roots"] + (seconds["moments"] if quantity == "whole" else 0.0)
    return (seconds["polar"] + seconds["maps"] + renewed / int(interval)) / threads


class _Trained(nn.Module):
    """A model called as its workload calls it."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.model, self.workload = model, workload

    def forward(self, _: Tensor) -> Tensor:
        return self.workload.loss(self.model, self.workload.batches[0])


def _seconds(
    work: Sequence[Operation], dtype: torch.dtype, known: dict[tuple[object, ...], float]
) -> float:
    total = 0.0
    for operation in work:
        one = _one(operation)
        key = (*one, dtype)
        if key not in known:
            known[key] = _timed(one, dtype)
        total += operation.count * known[key]
    return total


def _one(operation: Operation) -> tuple[object, ...]:
    if isinstance(operation, Product):
        return "product", operation.m, operation.k, operation.n
    return operation.routine, operation.m, operation.n


def _timed(one: tuple[object, ...], dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: object) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)  # type: ignore[call-overload]

    kind, m, *others = one
    if kind == "product":
        k, n = others
        A, B = random(m, k), random(k, n)
        return _best(lambda: A @ B)
    S = random(m, m)
    S = S @ S.mT
    return _best(lambda: torch.linalg.eigh(S))


def _best(call: Callable[[], object]) -> float:
    call()
    taken: list[float] = []
    while len(taken) < REPEATS and (not taken or sum(taken) < ENOUGH):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken)
