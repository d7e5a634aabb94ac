"""What a step multiplies and decomposes, as lists of operations made from shapes alone.

A method's row in `METHODS` says what is done every step, what whenever statistics are due, and what
whenever maps are renewed. Elementwise work is not listed: it is of the order of the weights, as
AdamW's is. The tests hold every row to the operations of the real step.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gomuon.geometry.captured import alpha_of_sides
from gomuon.methods.work import Decomposition, Product, Work, polar_work, symmetric

Settings = Mapping[str, Any]
Tensors = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MatrixLayer:
    """What the cost of a matrix parameter depends on.

    Attributes:
        name: the parameter's.
        tensors: (rows, elements in a row) of the parameter and of a bias that joins it.
        rows: blocks along the outputs.
        columns: blocks along the inputs.
        m: rows of a block.
        n: columns of a block.
        reads: equal for layers that read the same tensors; None for one nothing is captured of.
        grouped: moments come one per block of rows, as a grouped convolution's do.
        uses: rows the weight is used on in one forward pass, however long that is.
        float64: the step computes in float64, else in float32.
    """

    name: str
    tensors: Tensors
    rows: int
    columns: int
    m: int
    n: int
    reads: Hashable | None = None
    grouped: bool = False
    uses: int = 1
    float64: bool = False

    @property
    def blocks(self) -> int:
        return self.rows * self.columns

    @property
    def factors(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(count, side) of the captured factors, left and right."""
        return (self.rows, self.m), (self.rows if self.grouped else self.columns, self.n)

    @property
    def moments(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(count, side) of the captured sums; they are cut into blocks only afterwards."""
        if self.grouped:
            return self.factors
        return (1, self.rows * self.m), (1, self.columns * self.n)

    @property
    def grams(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(count, side) of factors made of the gradient, which every block has."""
        return (self.blocks, self.m), (self.blocks, self.n)


def units_of(layers: Sequence[MatrixLayer], method: str) -> list[list[MatrixLayer]]:
    """Layers that share captured inputs together, every other one alone."""
    units: dict[Hashable, list[MatrixLayer]] = {}
    for index, layer in enumerate(layers):
        alone = layer.reads is None or not METHODS[method].captures
        units.setdefault(("alone", index) if alone else layer.reads, []).append(layer)
    return list(units.values())


def captured(layer: MatrixLayer, method: str, settings: Settings) -> tuple[bool, bool]:
    """Whether (left, right) factors of this layer are captured."""
    if layer.reads is None or not METHODS[method].captures:
        return False, False
    left, right = alpha_of_sides(settings["alpha"]) if "alpha" in settings else (1.0, 1.0)
    return left > 0, right > 0


def cut(layer: MatrixLayer) -> tuple[int, int]:
    """Layers of a unit share a right factor if they are cut alike."""
    return layer.rows, layer.columns


def first_of_their_cut(unit: Sequence[MatrixLayer]) -> list[MatrixLayer]:
    """One layer for each right factor of a unit."""
    return list({cut(layer): layer for layer in reversed(unit)}.values())


# ---- every step: source, direction, scale ------------------------------------------------------


def maps_work(layer: MatrixLayer, left: bool, right: bool) -> Work:
    """P_B X P_A."""
    b, m, n = layer.blocks, layer.m, layer.n
    work: Work = [Product(b, m, m, n)] if left else []
    return [*work, Product(b, m, n, n)] if right else work


def _matched_polar(layer: MatrixLayer, known: tuple[bool, bool], settings: Settings) -> Work:
    """Products inside and outside the polar factor; without maps, the factor alone."""
    method, float64 = settings["polar"], layer.float64
    work = polar_work(layer.blocks, layer.m, layer.n, method, float64=float64)
    return 2 * maps_work(layer, *known) + work


def _natural_gradient(layer: MatrixLayer, known: tuple[bool, bool], settings: Settings) -> Work:
    """Into both eigenbases and back."""
    return 2 * maps_work(layer, True, True) if all(known) else []


def _preconditioned(layer: MatrixLayer, known: tuple[bool, bool], settings: Settings) -> Work:
    return maps_work(layer, True, True)


# ---- statistics and maps -----------------------------------------------------------------------


def _gram_work(layer: MatrixLayer) -> Work:
    """GGᵀ and GᵀG."""
    b, m, n = layer.blocks, layer.m, layer.n
    return [Product(b, m, n, m), Product(b, n, m, n)]


def _root(count: int, d: int) -> Work:
    """An inverse root: eigenvectors, and the product that puts it together."""
    return [Decomposition(count, "eigh", d, d), *symmetric(count, d, d)]


def _eigenbasis(count: int, d: int) -> Work:
    return [Decomposition(count, "eigh", d, d)]


@dataclass(frozen=True)
class Method:
    """What a recipe multiplies: the row to change when its step changes."""

    direction: Callable[[MatrixLayer, tuple[bool, bool], Settings], Work]
    map_of: Callable[[int, int], Work] | None = None  # of `count` factors of side d
    captures: bool = False  # factors are captured moments; else Grams of the gradient


METHODS: dict[str, Method] = {
    "GoMuon": Method(_matched_polar, _root, captures=True),
    "Muon": Method(_matched_polar),
    "Shampoo": Method(_preconditioned, _root),
    "KFAC": Method(_natural_gradient, _eigenbasis, captures=True),
}


def step_work(unit: Sequence[MatrixLayer], method: str, settings: Settings) -> Work:
    """What the owner of a unit does every step."""
    work: Work = []
    for layer in unit:
        work += METHODS[method].direction(layer, captured(layer, method, settings), settings)
    return work


def statistics_work(unit: Sequence[MatrixLayer], method: str, settings: Settings) -> Work:
    """What the owner multiplies whenever statistics are due; moments are `moment_work`'s."""
    row = METHODS[method]
    if row.captures or row.map_of is None:
        return []
    return [operation for layer in unit for operation in _gram_work(layer)]


def map_work(unit: Sequence[MatrixLayer], method: str, settings: Settings) -> Work:
    """What the owner does to renew the maps, once for a right factor that layers share."""
    row = METHODS[method]
    if row.map_of is None:
        return []
    factors: list[tuple[int, int]] = []
    if row.captures:
        factors += [x.factors[0] for x in unit if captured(x, method, settings)[0]]
        leaders = first_of_their_cut(unit)
        factors += [x.factors[1] for x in leaders if captured(x, method, settings)[1]]
    else:
        factors += [side for layer in unit for side in layer.grams]
    return [operation for count, d in factors for operation in row.map_of(count, d)]


def moments_of(
    unit: Sequence[MatrixLayer], method: str, settings: Settings
) -> list[tuple[int, int, int]]:
    """(count, side, uses) of the sums captured of a unit: Σδδᵀ of every layer, Σxxᵀ once."""
    lefts = [(*x.moments[0], x.uses) for x in unit if captured(x, method, settings)[0]]
    rights = [(*x.moments[1], x.uses) for x in unit[:1] if captured(x, method, settings)[1]]
    return lefts + rights


def moment_work(
    unit: Sequence[MatrixLayer], method: str, settings: Settings, passes: float = 1.0
) -> Work:
    """What *every* rank multiplies in the backward pass of so many forward passes."""
    share = passes / settings.get("token_stride", 1)  # to a row in each sequence
    return [
        product
        for count, d, uses in moments_of(unit, method, settings)
        for product in symmetric(count, d, round(uses * share))
    ]
