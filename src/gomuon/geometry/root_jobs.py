"""Maps made of the layers' factors, all factors of one shape at once."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gomuon.functional.inverse_roots import RootMethod
from gomuon.functional.root_batches import (
    Root,
    RootBatch,
    finished_roots,
    read_roots,
    start_roots,
)
from gomuon.parameters.stacks import Layer, Stack, group_by_key

StoreResult = Callable[[Layer, Tensor | None], bool]  # returns whether there was a result


class RootJob(Protocol):
    """Roots of a batch of factors, and where they are stored."""

    @property
    def batch(self) -> RootBatch: ...

    def store(self, dropped: Collection[Layer]) -> list[Layer]:
        """Store the roots, and return the layers that got none.

        Layers whose new factor was `dropped` keep their maps: no root is expected for them.
        """


def run_jobs(jobs: Sequence[RootJob], method: RootMethod) -> list[Layer]:
    """Take and store all roots. Waits for the device once, if they are taken by products."""
    batches = [job.batch for job in jobs]
    start_roots(batches, method)
    read_roots(batches)
    return store_all(jobs)


def store_all(jobs: Sequence[RootJob], dropped: Collection[Layer] = ()) -> list[Layer]:
    """Store roots that were started and read; takes those by decomposition."""
    by_batch = {id(job.batch): job for job in jobs}
    finished = finished_roots([job.batch for job in jobs])
    return [layer for batch in finished for layer in by_batch[id(batch)].store(dropped)]


@dataclass(frozen=True)
class FactorJob:
    """Factors, each with the layers that share it, and how these layers store the root."""

    batch: RootBatch
    layers: Sequence[Sequence[Layer]]
    store_result: StoreResult

    def store(self, dropped: Collection[Layer]) -> list[Layer]:
        failed: list[Layer] = []
        for index, same in enumerate(self.layers):
            if same[0] in dropped and self.batch.found(index) is None:
                continue
            result = result_of(self.batch, index, same)
            failed += [layer for layer in same if not self.store_result(layer, result)]
        return failed


@dataclass(frozen=True)
class StackJob:
    """A factor for every block of a stack; the roots are its maps with this name."""

    batch: RootBatch
    stack: Stack
    name: str

    def store(self, dropped: Collection[Layer]) -> list[Layer]:
        return self.stack.set_maps(self.name, block_results(self.batch, self.stack))


def map_jobs(
    layers: Sequence[Layer],
    side: str,
    root: Root,
    prepared: Callable[[Tensor], Tensor] = lambda S: S,
) -> list[FactorJob]:
    """Jobs that make `{side}_map` from every factor; `prepared` is applied to factors first."""
    return factor_jobs(layers, side, root, store_map(f"{side}_map"), prepared)


def factor_jobs(
    layers: Sequence[Layer],
    side: str,
    root: Root,
    store: StoreResult,
    prepared: Callable[[Tensor], Tensor] = lambda S: S,
) -> list[FactorJob]:
    """Jobs that take a root of every factor of a side, once for layers that share it."""
    known = [layer for layer in layers if f"{side}_factor" in layer.state]
    shared = group_by_key(known, lambda layer: id(layer.state[f"{side}_factor"]))
    jobs = []
    for batch in group_by_key(shared, lambda same: form_of(same[0].state[f"{side}_factor"])):
        factors = [same[0].state[f"{side}_factor"] for same in batch]
        jobs.append(FactorJob(RootBatch(factors, root, prepared), batch, store))
    return jobs


def store_map(name: str) -> StoreResult:
    """Stores the root as the layer's map with this name."""
    return lambda layer, found: layer.set_map(name, found)


def form_of(S: Tensor) -> tuple[object, ...]:
    """Equal for tensors that can be stacked."""
    return S.shape, S.dtype, S.device


def block_results(batch: RootBatch, stack: Stack) -> list[Tensor | None]:
    """The root of every block of a stack."""
    blocks = [layer for layer in stack.layers for _ in range(layer.blocks)]
    return [result_of(batch, index, [layer]) for index, layer in enumerate(blocks)]


def result_of(batch: RootBatch, index: int, layers: Iterable[Layer]) -> Tensor | None:
    """The root of one factor. Counts in these layers' states if products failed."""
    result, fell_back = batch.result(index)
    for layer in layers if fell_back else ():
        layer.state["root_fallbacks"] = layer.state.get("root_fallbacks", 0) + 1
    return result
