"""The least time a step can take: polar factors, maps, roots and moments only, divided by cores.

Polar factors are timed on a run's own sources, because the time of an exact one depends on their
condition number; the time of products and eigendecompositions does not. Elementwise work, memory
beyond the caches and threads that wait for each other are left out. No arrangement of the same
operations can be faster than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.functional import polar
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import PolarMethod
from gomuon.lab.bench.interleaving import Runner
from gomuon.lab.bench.workloads import Workload
from gomuon.lab.costs.input_uses import find_input_uses
from gomuon.lab.costs.matrix_layers import find_layers, units_of
from gomuon.lab.costs.unit_costs import moment_work, renewal_work
from gomuon.lab.machine import on_threads
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.work import Operation, Product, Work, maps_work
from gomuon.watching.layer_updates import LayerUpdate

Seconds = Mapping[str, float]  # of one core, by kind of work
METHODS = ("Muon", "GoMuon")
REPEATS, ENOUGH = 5, 0.5  # the best of 5 calls, or of as many as fit into half a second


def measure(workload: Workload, runners: Mapping[str, Runner]) -> dict[str, dict[str, float]]:
    """Seconds of one core by arm and kind of work, for the arms that are Muon or Go-MUON.

    Every arm's settings say what is timed; operations that arms have in common are timed once.
    """
    known: dict[tuple[object, ...], float] = {}
    found: dict[str, dict[str, float]] = {}
    for name, runner in runners.items():
        optimizer: Any = runner.stepper
        if not isinstance(optimizer, MatrixOptimizer) or optimizer.recipe.name not in METHODS:
            continue
        stacks = sources(runner)
        with on_threads(1):
            found[name] = {
                "polar": _polar_seconds(stacks, optimizer.defaults["polar"]),
                **{kind: _seconds(w, known) for kind, w in parts(workload, optimizer).items()},
            }
    return found


def sources(runner: Runner) -> list[Tensor]:
    """The matrices whose polar factors one more step computes: a tensor [b, m, n] per shape."""
    seen: dict[tuple[int, ...], list[Tensor]] = {}

    def observe(layer: LayerUpdate) -> None:
        C = preconditioned(layer.source, layer.left_map, layer.right_map)
        seen.setdefault(tuple(C.shape[1:]), []).append(C.clone())

    optimizer: Any = runner.stepper
    stop = optimizer.add_observer(observe)
    runner.timed_step()
    stop()
    return [torch.cat(alike) for alike in seen.values()]


def parts(workload: Workload, optimizer: MatrixOptimizer) -> dict[str, Work]:
    """The products and decompositions of a step, without the polar factors."""
    recipe = optimizer.recipe
    work: dict[str, Work] = {"maps": [], "roots": [], "moments": []}
    if recipe.work is None or recipe.work.captured is None:
        return work
    model = workload.make()
    settings = {key: optimizer.defaults[key] for key in recipe.settings}
    uses = find_input_uses(_Trained(model, workload), torch.empty(0))
    for unit in units_of(find_layers(model, recipe, settings, uses).layers):
        for layer in unit:
            work["maps"] += 2 * maps_work(layer.matrices, *layer.matrices.captured)
        work["roots"] += renewal_work(unit, recipe.work)
        work["moments"] += moment_work(unit)
    return work


def least(seconds: Seconds, quantity: str, interval: int, threads: int) -> float | None:
    """The least seconds of a step; for "whole", of its hooks and its step.

    Args:
        seconds: of one arm, from `measure`.
        quantity: what is asked for; None is returned for all but these two.
        interval: steps between two refreshes.
        threads: among which the work is divided.
    """
    if quantity not in ("step", "whole"):
        return None
    renewed = seconds["roots"] + (seconds["moments"] if quantity == "whole" else 0.0)
    return (seconds["polar"] + seconds["maps"] + renewed / interval) / threads


class _Trained(nn.Module):
    """A model that is called the way its workload calls it."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.model, self.workload = model, workload

    def forward(self, _: Tensor) -> Tensor:
        return self.workload.loss(self.model, self.workload.batches[0])


def _polar_seconds(stacks: Sequence[Tensor], method: PolarMethod) -> float:
    """Matrix by matrix or a whole stack in one call, whichever is faster."""

    def taken(X: Tensor) -> float:
        return _best(partial(polar, X, method))

    return sum(min(taken(stack), sum(taken(X) for X in stack)) for stack in stacks)


def _seconds(work: Sequence[Operation], known: dict[tuple[object, ...], float]) -> float:
    total = 0.0
    for operation in work:
        one = _one(operation)
        if one not in known:
            known[one] = _timed(one)
        total += operation.count * known[one]
    return total


def _one(operation: Operation) -> tuple[object, ...]:
    if isinstance(operation, Product):
        return "product", operation.m, operation.k, operation.n
    return operation.routine, operation.m, operation.n


def _timed(one: tuple[object, ...]) -> float:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: object) -> Tensor:
        return torch.randn(*shape, generator=generator)  # type: ignore[call-overload]

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
