"""What units of layers multiply, decompose and keep, by the costs that their method states.

A unit is a list of layers that read one input and have one owner; see `matrix_layers.units_of`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gomuon.lab.costs.exchange import ALL_ROWS, RowShare
from gomuon.lab.costs.matrix_layers import MatrixLayer, SideFactors
from gomuon.parameters.side_forms import LEFT, RIGHT
from gomuon.recipes.work import CapturedFactors, Factors, LayerWork, StepWork, Work, symmetric

STEP_BYTES = 4  # AdamW's own count of steps, one float32 for each parameter
Layers = Sequence[MatrixLayer]
_MAPS = ("left_map", "right_map")

# ---- operations ----------------------------------------------------------------------------------


def layers_work(unit: Layers, part: LayerWork) -> Work:
    """One part of a method's work (`StepWork.step`, `.observe`, …) for every layer."""
    return [operation for x in unit for operation in part(x.matrices, x.settings)]


def renewal_work(unit: Layers, work: StepWork, *, first: bool = False) -> Work:
    """What renews maps, or makes the `first` ones; once for a right factor that layers share."""
    made = layers_work(unit, work.renew)
    if (captured := work.captured) is not None:
        each = (captured.first_map_work if first else None) or captured.map_work
        for factors in _maps_made(unit, captured):
            made += each(factors, unit[0].settings)
    return made


def _maps_made(unit: Layers, captured: CapturedFactors) -> list[Factors]:
    """The square factors that maps are made of."""
    both: list[tuple[int, SideFactors]]
    if captured.one_for == "block":
        both = [
            (side, SideFactors(x.matrices.count, x.factors[side].form))
            for x in unit
            for side in _captured(x)
        ]
    else:
        both = [(LEFT, x.factors[LEFT]) for x in unit if x.matrices.captured[LEFT]]
        both += [(RIGHT, x.factors[RIGHT]) for x in _right_factor(unit)]
    float64 = unit[0].matrices.float64
    return [Factors(*made.squares, side, float64) for side, made in both]


def _captured(layer: MatrixLayer) -> list[int]:
    """The captured sides."""
    return [where for where in (LEFT, RIGHT) if layer.matrices.captured[where]]


def _right_factor(unit: Layers) -> Layers:
    """A layer whose right factor all layers of the unit share; none if it is not captured."""
    return [x for x in unit if x.matrices.captured[RIGHT]][:1]


@dataclass(frozen=True)
class CapturedSum:
    """The sum of one side of a layer, Σδδᵀ (left) or Σxxᵀ (right).

    Attributes:
        layer: the layer, or one of those that share the sum.
        where: the side.
    """

    layer: MatrixLayer
    where: int

    @property
    def factors(self) -> SideFactors:
        return self.layer.factors[self.where]

    @property
    def numbers_of_rows(self) -> int:
        """How many are sent beside the sum."""
        return 2 * self.layer.stack

    def work(self, passes: float, share: RowShare) -> Work:
        """What a rank multiplies that reads its `share` of the rows of so many passes."""
        count, side = self.factors.squares
        rows = share.rows(self.layer, passes, self.where)
        return symmetric(count // self.layer.stack, side, rows)  # those of a whole stack together


def moments_of(unit: Layers) -> list[CapturedSum]:
    """The sums captured of a unit: Σδδᵀ of every layer, Σxxᵀ once."""
    lefts = [CapturedSum(x, LEFT) for x in unit if x.matrices.captured[LEFT]]
    return lefts + [CapturedSum(x, RIGHT) for x in _right_factor(unit)]


def moment_work(unit: Layers, passes: float = 1.0, share: RowShare = ALL_ROWS) -> Work:
    """What a rank multiplies in the backward pass of so many forward passes."""
    return [product for one in moments_of(unit) for product in one.work(passes, share)]


# ---- state ---------------------------------------------------------------------------------------


def state_elements(unit: Layers, work: StepWork) -> int:
    """Elements of everything kept for a unit; tensors that layers share count once."""
    return kept_elements(unit, work).total()


def kept_elements(unit: Layers, work: StepWork) -> Counter[str]:
    """The same by the names that tensors have in the state; K-FAC's bases count as maps.

    What is kept beside a map in its form counts as a part of it.
    """
    kept: Counter[str] = Counter()
    for x in unit:
        kept.update(work.keeps(x.matrices, x.settings))
    if work.captured is None:
        return kept
    for layer in unit:
        for where in _captured(layer):
            elements = _map_elements(layer, where, work.captured)
            kept[_MAPS[where]] += work.captured.copies * elements
        if work.captured.keeps_factors and layer.matrices.captured[LEFT]:
            kept["left_factor"] += layer.factors[LEFT].elements
            kept["left_seen_each"] += _seen_each(layer)
    for layer in _right_factor(unit):
        right = layer.factors[RIGHT]
        if work.captured.keeps_factors and work.captured.keeps_inputs(layer.settings):
            kept["right_factor"] += right.elements
            kept["right_seen_each"] += _seen_each(layer)
        copied = any(right.strips != x.matrices.count for x in unit)
        if work.captured.one_for == "factor" and copied:
            kept[_MAPS[RIGHT]] += right.elements_of(work.captured.map_elements)
    return kept


def _seen_each(layer: MatrixLayer) -> int:
    """When each matrix of a stack was observed last."""
    return layer.stack if layer.stack > 1 else 0


def _map_elements(layer: MatrixLayer, where: int, factors: CapturedFactors) -> int:
    """A map for every matrix, as the step stacks them, and the maps they are copies of, if fewer.

    Those of the right side are left to the caller where layers share them.
    """
    made = layer.factors[where]
    shared = where == RIGHT and factors.one_for == "factor"
    copied = made.strips != layer.matrices.count and factors.one_for != "block" and not shared
    stacked = replace(made, strips=layer.matrices.count)
    elements = stacked.elements_of(factors.map_elements)
    return elements + copied * made.elements_of(factors.map_elements)


def adamw_bytes(parameters: Sequence[int], size: int) -> int:
    """Two moments and a count for each parameter, given by its elements on this rank."""
    return sum(2 * size * elements + STEP_BYTES for elements in parameters)
