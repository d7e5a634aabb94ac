"""Bytes of optimizer state, from shapes alone; the tests hold them to the real state's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.costs import METHODS, MatrixLayer, Settings, captured, first_of_their_cut

STEP_BYTES = 4  # AdamW's own count of steps, one float32 for each parameter


@dataclass(frozen=True)
class Kept:
    """How many d×d tensors a method with captured factors keeps for each factor.

    Attributes:
        left: of the output side.
        right: of the input side, in every layer's state.
        shared: of the input side, one for all layers that share it.
        values: whether eigenvalues are kept beside, for every layer and side.
    """

    left: int
    right: int
    shared: int
    values: bool = False


KEPT = {
    "GoMuon": Kept(left=2, right=0, shared=1),  # B̄, P_B; P_A
    "KFAC": Kept(left=2, right=1, shared=1, values=True),  # B, V_B; V_A, A
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
    kept, leaders = KEPT[method], first_of_their_cut(unit)
    # Go-MUON's A is sampled and held: unless it is averaged, nothing of it outlives its map.
    shared = kept.shared + (settings.get("input_decay") is not None)
    for layer in unit:
        left, right = captured(layer, method, settings)
        (rows, m), (columns, n) = layer.factors
        total += left * rows * (kept.left * m * m + kept.values * m)
        total += right * columns * (kept.right * n * n + kept.values * n)
        total += right * columns * (layer in leaders) * shared * n * n
    return total


def adamw_bytes(parameters: Sequence[int], size: int) -> int:
    """Two moments and a count for each parameter, given by its elements on this rank."""
    return sum(2 * size * elements + STEP_BYTES for elements in parameters)
