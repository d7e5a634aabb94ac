"""What units of layers multiply, decompose and keep, by the costs that their method states.

A unit is a list of layers that read one input and have one owner; see `layers.units_of`.
"""

from collections.abc import Sequence

from gomuon.lab.costs.layers import MatrixLayer
from gomuon.recipes.work import CapturedFactors, Factors, LayerWork, StepWork, Work, symmetric

STEP_BYTES = 4  # AdamW's own count of steps, one float32 for each parameter
Layers = Sequence[MatrixLayer]

# ---- operations ----------------------------------------------------------------------------------


def layers_work(unit: Layers, part: LayerWork) -> Work:
    """One part of a method's work (`StepWork.step`, `.observe`, …) for every layer."""
    return [operation for x in unit for operation in part(x.matrices, x.settings)]


def renewal_work(unit: Layers, work: StepWork) -> Work:
    """What renews the maps, once for a right factor that layers share."""
    made = layers_work(unit, work.renew)
    if work.captured is not None:
        for factors in _maps_made(unit, work.captured):
            made += work.captured.map_work(factors, unit[0].settings)
    return made


def _maps_made(unit: Layers, captured: CapturedFactors) -> list[Factors]:
    """The factors that maps are made of."""
    float64 = unit[0].matrices.float64
    if captured.one_for == "block":
        both = [(x.matrices, x.matrices.captured) for x in unit]
        lefts = [Factors(x.count, x.m, 0, float64) for x, (left, _) in both if left]
        return lefts + [Factors(x.count, x.n, 1, float64) for x, (_, right) in both if right]
    lefts = [Factors(*x.factors[0], 0, float64) for x in unit if x.matrices.captured[0]]
    return lefts + [Factors(*x.factors[1], 1, float64) for x in _right_factors(unit)]


def _right_factors(unit: Layers) -> list[MatrixLayer]:
    """One layer for each captured right factor: layers that are cut alike share it."""
    captured = [x for x in unit if x.matrices.captured[1]]
    return list({(x.rows, x.columns): x for x in reversed(captured)}.values())


def moments_of(unit: Layers) -> list[tuple[int, int, int]]:
    """(count, side, uses) of the sums captured of a unit: Σδδᵀ of every layer, Σxxᵀ once."""
    lefts = [(*x.moments[0], x.uses) for x in unit if x.matrices.captured[0]]
    rights = [(*x.moments[1], x.uses) for x in unit[:1] if x.matrices.captured[1]]
    return lefts + rights


def moment_work(unit: Layers, passes: float = 1.0) -> Work:
    """What *every* rank multiplies in the backward pass of so many forward passes."""
    settings = unit[0].settings
    # To a row in each sequence; of an example that is reduced to one row, no row is left out.
    stride = 1 if settings.get("reduce") else settings.get("token_stride", 1)
    return [
        product
        for count, d, uses in moments_of(unit)
        for product in symmetric(count, d, round(uses * passes / stride))
    ]


# ---- state ---------------------------------------------------------------------------------------


def state_elements(unit: Layers, work: StepWork) -> int:
    """Elements of everything kept for a unit; tensors that layers share count once."""
    total = sum(sum(work.keeps(x.matrices, x.settings).values()) for x in unit)
    if work.captured is None:
        return total
    for layer in unit:
        left, right = layer.matrices.captured
        count, m = layer.factors[0]
        total += left * (count * m * m + _map_elements(layer, 0, work.captured))
        total += right * _map_elements(layer, 1, work.captured)
    for layer in _right_factors(unit):
        count, n = layer.factors[1]
        total += work.captured.keeps_inputs(layer.settings) * count * n * n
        if work.captured.one_for == "factor" and count != layer.matrices.count:
            total += count * work.captured.map_elements(n)
    return total


def _map_elements(layer: MatrixLayer, side: int, factors: CapturedFactors) -> int:
    """A map for every block, as the step stacks them, and the maps they are copies of, if fewer.

    Those of the right side are left to the caller where layers share them.
    """
    blocks, (count, d) = layer.matrices.count, layer.factors[side]
    shared = side == 1 and factors.one_for == "factor"
    copied = count != blocks and factors.one_for != "block" and not shared
    return (blocks + copied * count) * factors.map_elements(d)


def adamw_bytes(parameters: Sequence[int], size: int) -> int:
    """Two moments and a count for each parameter, given by its elements on this rank."""
    return sum(2 * size * elements + STEP_BYTES for elements in parameters)
