"""Bytes of optimizer state, from shapes alone; the tests hold them to the real state's tensors."""

from collections.abc import Sequence

from gomuon.costs import METHODS, MatrixLayer, Settings, captured, first_of_their_cut

STEP_BYTES = 4  # AdamW's own count of steps, one float32 for each parameter


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
    leaders = first_of_their_cut(unit)
    for layer in unit:
        left, right = captured(layer, method, settings)
        (rows, m), (columns, n) = layer.factors
        leads = layer in leaders
        if method == "KFAC":  # factors, bases and eigenvalues; bases are each layer's own
            total += left * rows * (2 * m * m + m)
            total += right * columns * (leads * n * n + n * n + n)
        else:
            # A is sampled and held: unless it is averaged, nothing outlives its map.
            averaged = settings.get("input_decay") is not None
            total += left * 2 * rows * m * m
            total += right * leads * (1 + averaged) * columns * n * n
    return total


def adamw_bytes(parameters: Sequence[int], size: int) -> int:
    """Two moments and a count for each parameter, given by its elements on this rank."""
    return sum(2 * size * elements + STEP_BYTES for elements in parameters)
