"""Bytes of optimizer state, from shapes alone; the tests hold them to the real state's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab.costs.work import METHODS, MatrixLayer, Settings, captured, first_of_their_cut

STEP_BYTES = 4  # AdamW's own count of steps, one float32 for each parameter


@dataclass(frozen=True)
class Kept:
    """What a method with captured factors keeps beside them.

    Attributes:
        averages: whether the (left, right) factors outlive their maps.
        values: whether eigenvalues are kept beside the eigenvectors, which are its maps.
    """

    averages: tuple[bool, bool]
    values: bool = False


KEPT = {
    "GoMuon": Kept(averages=(True, False)),  # B̄, P_B, P_A; A is sampled and held
    "KFAC": Kept(averages=(True, True), values=True),
}


def memories(method: str, settings: Settings) -> int:
    """Tensors of the weight's size: the momentum, and the squares a graft averages."""
    return 1 + (settings.get("graft") in ("adagrad", "rmsprop"))


def unit_elements(unit: Sequence[MatrixLayer], method: str, settings: Settings) -> int:
    """Elements of everything kept for a unit; tensors that layers share count once."""
    total = memories(method, settings) * sum(x.blocks * x.m * x.n for x in unit)
    row = METHODS[method]
    if row.map_of is None:
        return total
    if not row.captures:  # a factor and a map for either side of every block
        return total + sum(2 * count * d * d for x in unit for count, d in x.grams)
    kept = KEPT[method]
    left_average, right_average = kept.averages
    right_average = right_average or settings.get("input_decay") is not None
    for layer in unit:
        left, right = captured(layer, method, settings)
        total += left * (left_average * _square(layer.factors[0]) + _maps(layer, 0, kept.values))
        total += right * _maps(layer, 1, kept.values)
    for layer in first_of_their_cut(unit):  # once for all layers that share it
        if captured(layer, method, settings)[1]:
            count, n = layer.factors[1]
            total += right_average * count * n * n
            # Bases are cloned for every layer, so those are never shared.
            total += 0 if kept.values or count == layer.blocks else count * n * n
    return total


def _square(factor: tuple[int, int]) -> int:
    count, d = factor
    return count * d * d


def _maps(layer: MatrixLayer, side: int, values: bool) -> int:
    """A map for every block, as the step stacks them, and the maps they are copies of, if fewer."""
    count, d = layer.factors[side]
    each = d * d + (d if values else 0)
    own = count != layer.blocks and (side == 0 or values)
    return layer.blocks * each + (count * each if own else 0)


def adamw_bytes(parameters: Sequence[int], size: int) -> int:
    """Two moments and a count for each parameter, given by its elements on this rank."""
    return sum(2 * size * elements + STEP_BYTES for elements in parameters)
