"""Maps: roots of the factors, Equation (29), taken once for layers that share a factor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gomuon.functional.factors import Root, RootBatch
from gomuon.geometry.base import Group
from gomuon.geometry.observations import likeness, not_none
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacking import group_by_key

StoreResult = Callable[[Layer, Tensor | None], bool]  # returns whether there was a result


def alpha_of_sides(alpha: float | tuple[float, float]) -> tuple[float, float]:
    """α of the left (output, B) and of the right (input, A) side."""
    return (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


def root_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """P_B = B̄^(−α), P_A = A^(−α), Equation (29) at α = ¼."""
    powers = zip(("left", "right"), alpha_of_sides(group["alpha"]), strict=True)
    return [
        batch
        for side, alpha in powers
        if alpha > 0
        for batch in map_batches(layers, side, Root.of(alpha, group["max_condition"]))
    ]


def map_batches(
    layers: Sequence[Layer],
    side: str,
    root: Root,
    store: StoreResult | None = None,
    prepared: Callable[[Tensor], Tensor] = lambda S: S,
    start: str | None = None,
) -> list[RootBatch]:
    """A root of every factor of a side, once for layers that share it: their `{side}_map`.

    `start` names the entry of the state from which products start.
    """
    known = [layer for layer in layers if f"{side}_factor" in layer.state]
    shared = group_by_key(known, lambda layer: id(layer.state[f"{side}_factor"]))
    batches = []
    computed = [(same, not_none(same[0].computed(f"{side}_factor"))) for same in shared]
    for same_form in group_by_key(computed, lambda both: likeness(both[1])):
        stored = SharedStore(
            [same for same, _ in same_form], store or as_map(f"{side}_map"), f"{side}_map"
        )
        factors = [factor for _, factor in same_form]
        starts = (
            None if start is None else [not_none(same[0].computed(start)) for same, _ in same_form]
        )
        batches.append(RootBatch(factors, root, stored, prepared, starts))
    return batches


def as_map(name: str) -> StoreResult:
    """Stores a root as the layer's map with this name."""
    return lambda layer, root: layer.set_map(name, root)


@dataclass(frozen=True)
class SharedStore:
    """Gives each root of a batch to the layers that share its factor; returns those without one.

    Attributes:
        layers: for each root the layers that share its factor.
        store: stores it in a layer.
        name: of a map which matrices of a stack keep if they had no rows.
    """

    layers: Sequence[Sequence[Layer]]
    store: StoreResult
    name: str = ""

    def __call__(self, batch: RootBatch) -> list[Layer]:
        failed: list[Layer] = []
        for index, same in enumerate(self.layers):
            root, fell_back = batch.result(index)
            if root is not None:
                root = same[0].kept_where_unseen(self.name, root)
                root = same[0].stored("map", root)  # once, so that the layers share it
            for layer in same:
                if fell_back:
                    layer.count("root_fallbacks")
                if not self.store(layer, root):
                    failed.append(layer)
        return failed
