"""What a method computes and keeps, from shapes alone: the costs that `gomuon plan` adds up.

Every method's file has its own `StepWork` (`Recipe.work`); what several methods have in common
stands here. Elementwise work is not listed: it is of the order of the weights, as AdamW's is. The
tests hold every method to the operations and to the state of its real step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gomuon.functional.orthonormal import (
    LATER_STEPS,
    eigenbasis_products,
    gram_schmidt_products,
)
from gomuon.functional.polar_express import (
    BFLOAT16_STEPS,
    FAST_STEPS,
    RECTANGULAR,
    STEPS_PER_GRAM,
)
from gomuon.functional.product_roots import product_count
from gomuon.intervals import Rotated
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm

Group = Mapping[str, Any]

# ---- operations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """`count` products [m, k]·[k, n], 2mkn operations each."""

    count: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n


@dataclass(frozen=True)
class Decomposition:
    """`count` decompositions of [m, n] by LAPACK or its like.

    "solve" is S⁻¹X with S [m, m] and X [m, n].
    """

    count: int
    routine: str
    m: int
    n: int

    @property
    def flops(self) -> int:
        """The textbook's leading terms: an estimate of what a library does, not a count."""
        return self.count * round(DECOMPOSITIONS[self.routine](self.m, self.n))


Operation = Product | Decomposition
Work = list[Operation]


def _svd_flops(m: int, n: int) -> int:
    """U, Σ, V of the compact SVD: the better of Golub–Reinsch and R-SVD."""
    m, n = max(m, n), min(m, n)
    return min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)


def _singular_value_flops(m: int, n: int) -> float:
    """Σ alone."""
    m, n = max(m, n), min(m, n)
    return min(4 * m * n**2 - 4 * n**3 / 3, 2 * m * n**2 + 2 * n**3)


# Golub & Van Loan, Matrix Computations, 4th edition, sections 3.2, 5.2, 8.3 and 8.6.
DECOMPOSITIONS: dict[str, Callable[[int, int], float]] = {
    "eigh": lambda n, _: 9 * n**3,
    "svd": _svd_flops,
    "svdvals": _singular_value_flops,
    "qr": lambda m, n: 4 * n**2 * (m - n / 3),  # R, and Q written out
    "inv": lambda n, _: 2 * n**3,
    "solve": lambda m, n: 2 / 3 * m**3 + 2 * m**2 * n,
}


def flops(work: Sequence[Operation]) -> int:
    return sum(operation.flops for operation in work)


# ---- a method's costs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrices:
    """The matrices of one layer, as far as costs depend on them.

    Attributes:
        count: how many blocks the layer is cut into.
        m: rows of a block.
        n: columns of a block.
        float64: the step computes in float64, else in float32.
        captured: whether (left, right) factors of this layer are captured.
        forms: the forms of the left and right factors; None if both are whole.
        has_partner: whether the layer has a partner weight (`LayerSpec.partner`).
    """

    count: int
    m: int
    n: int
    float64: bool = False
    captured: tuple[bool, bool] = (False, False)
    forms: tuple[SideForm, SideForm] | None = None
    has_partner: bool = False

    def form(self, where: int) -> SideForm:
        """The form of a map on the left or right side."""
        return SideForm((self.m, self.n)[where]) if self.forms is None else self.forms[where]

    @property
    def elements(self) -> int:
        return self.count * self.m * self.n


LayerWork = Callable[[Matrices, Group], Work]
Kept = Mapping[str, int]  # elements of tensors in the state, by name


def no_work(matrices: Matrices, group: Group) -> Work:
    return []


def momentum(matrices: Matrices, group: Group) -> Kept:
    """The state of a method that keeps its momentum only."""
    return {"momentum": matrices.elements}


@dataclass(frozen=True)
class Factors:
    """`count` factors, d × d, of the left (0) or the right (1) side of a layer."""

    count: int
    d: int
    side: int
    float64: bool = False


@dataclass(frozen=True)
class CapturedFactors:
    """What a method makes of captured factors, and what it keeps.

    Attributes:
        map_work: of the maps that are made of such factors.
        first_map_work: of those that are made for the first time, if that is something else.
        one_for: "factor" if layers that share a factor share its map as well; "layer" if each of
            them keeps a copy of it; "block" if every block of every layer has a map made for it.
        map_elements: numbers in a map of side d; a diagonal has d.
        keeps_inputs: whether A is kept once its map is made.
        keeps_factors: whether A and B are kept at all.
        copies: how many tensors of a map's form are kept for each map, itself included.
    """

    map_work: Callable[[Factors, Group], Work]
    first_map_work: Callable[[Factors, Group], Work] | None = None
    one_for: Literal["factor", "layer", "block"] = "factor"
    map_elements: Callable[[int], int] = lambda d: d * d
    keeps_inputs: Callable[[Group], bool] = lambda group: True
    keeps_factors: bool = True
    copies: int = 1


@dataclass(frozen=True)
class StepWork:
    """What a method computes and keeps for the matrices of one layer.

    When factors are observed and maps are renewed is said by the recipe's clock, and which sums are
    captured by its geometry: neither is repeated here.

    Attributes:
        step: source, direction, scale and decay, on every step.
        observe: what is added whenever factors are observed, beside the captured sums.
        renew: what is added whenever maps are renewed, beside those made of captured factors.
        first: what the first step does, if that is something else.
        captured: what is made of captured factors; None if nothing is captured.
        keeps: the state, except captured factors and the maps made of them.
    """

    step: LayerWork
    observe: LayerWork = no_work
    renew: LayerWork = no_work
    first: LayerWork | None = None
    captured: CapturedFactors | None = None
    keeps: Callable[[Matrices, Group], Kept] = momentum


# ---- work that several methods have in common ----------------------------------------------------


def symmetric(count: int, d: int, rows: int) -> Work:
    """VᵀV of V [rows, d] as `symmetric_product` makes it, in strips of little more than half."""
    return _strips(count, d, rows, max(128, d // 16))


def symmetric_result_work(count: int, d: int, inner: int) -> Work:
    """AB [d, d] with A [d, inner], as `symmetric_result` makes it on the CPU."""
    return _strips(count, d, inner, max(64, d // 16))


def _strips(count: int, d: int, inner: int, block: int) -> Work:
    block = block if d >= 2 * block else d
    return [Product(count, min(block, d - begin), inner, d - begin) for begin in range(0, d, block)]


def polar_work(count: int, m: int, n: int, method: str, *, float64: bool = False) -> Work:
    """The polar factor, as `functional.polar` computes it; "exact" is the CPU's choice here.

    Exact ones are of well-conditioned matrices: others are polished by a few products more.
    """
    short, long = min(m, n), max(m, n)
    if method == "fast" or (method == "auto" and not float64):
        return fast_polar_work(count, short, long, float64=float64)
    if float64:
        return [Decomposition(count, "svd", m, n), Product(count, m, short, n)]
    return [  # through the Gram matrix: YᵀY, Y·(V·λ^(−½)·Vᵀ)
        *symmetric(count, short, long),
        Decomposition(count, "eigh", short, short),
        Product(count, short, short, short),
        Product(count, long, short, short),
    ]


def fast_polar_work(count: int, k: int, n: int, *, float64: bool = False) -> Work:
    """Polar Express of Y [k, n], k ≤ n, on hardware that multiplies bfloat16 natively."""
    late = 0 if float64 else BFLOAT16_STEPS
    gram, small = symmetric_result_work(count, k, n), symmetric_result_work(count, k, k)
    onto_Y = Product(count, k, k, n)
    work: Work = []
    if n >= RECTANGULAR * k:
        for begin in range(0, FAST_STEPS - late, STEPS_PER_GRAM):
            steps = min(STEPS_PER_GRAM, FAST_STEPS - late - begin)
            # Every step squares; all but the last renew the Gram; all but the first extend Q.
            work += [*gram, *(steps + 2 * (steps - 1) + (steps - 1)) * small, onto_Y]
    else:
        work += (FAST_STEPS - late) * [*gram, *small, onto_Y]
    return work + late * [Product(count, k, n, k), Product(count, k, k, k), onto_Y]


def plain_polar_work(x: Matrices, group: Group) -> Work:
    """polar(X)."""
    return polar_work(x.count, x.m, x.n, group["polar"], float64=x.float64)


def maps_work(x: Matrices, left: bool, right: bool) -> Work:
    """P_B X P_A, with the maps that there are. Diagonals multiply elementwise."""
    B, A = x.form(LEFT), x.form(RIGHT)
    work: Work = []
    if left and B.kind == "matrix":
        work.append(Product(x.count * B.blocks, B.size, B.size, x.n))
    if right and A.kind == "matrix":
        work.append(Product(x.count * A.blocks, x.m, A.size, A.size))
    return work


def matched_polar_work(x: Matrices, group: Group) -> Work:
    """P_B·polar(P_B X P_A)·P_A with captured maps, and decay in their geometry if asked for."""
    return 2 * maps_work(x, *x.captured) + plain_polar_work(x, group) + decay_work(x, group)


def decay_work(x: Matrices, group: Group) -> Work:
    """P_A² and W P_A², where `geometry_decay` asks for it."""
    A = x.form(RIGHT)
    if not (group.get("geometry_decay") and x.captured[1] and A.kind == "matrix"):
        return []
    squares = Product(x.count * A.blocks, A.size, A.size, A.size)
    return [squares, *maps_work(x, False, True)]


def gram_work(x: Matrices, group: Group) -> Work:
    """GGᵀ and GᵀG."""
    return [Product(x.count, x.m, x.n, x.m), Product(x.count, x.n, x.m, x.n)]


def root_work(x: Factors, group: Group, power: float, shift: float = 0.0) -> Work:
    """Inverse roots, as the setting `roots` says; "auto" is the CPU's choice here."""
    if group["roots"] == "products":
        dtype = torch.float64 if x.float64 else torch.float32
        return [Product(x.count * product_count(power, dtype, shift), x.d, x.d, x.d)]
    # Eigenvectors, and the product that puts them together.
    return [Decomposition(x.count, "eigh", x.d, x.d), *symmetric(x.count, x.d, x.d)]


def orthonormal_work(count: int, d: int) -> Work:
    """`functional.orthonormal.orthonormalised` of d × d matrices."""
    return _times(count, gram_schmidt_products(d))


def eigenbasis_work(count: int, d: int, group: Group, steps: int) -> Work:
    """Eigenvectors, as the setting `roots` says; "auto" is the CPU's choice here."""
    if group["roots"] == "products":
        return _times(count, eigenbasis_products(d, steps))
    return [Decomposition(count, "eigh", d, d)]


def _times(count: int, shapes: Sequence[tuple[int, int, int]]) -> Work:
    return [Product(count, *shape) for shape in shapes]


def both_roots_work(x: Matrices, group: Group, power: float, shift: float = 0.0) -> Work:
    """An inverse root for either side of every block."""
    both = [Factors(x.count, d, side, x.float64) for side, d in enumerate((x.m, x.n))]
    if isinstance(group.get("refresh_every"), Rotated):
        return [operation for each in both for operation in _kept_basis_work(each, group)]
    return [operation for each in both for operation in root_work(each, group, power, shift)]


def _kept_basis_work(x: Factors, group: Group) -> Work:
    """QᵀSQ of a cached basis, a new basis, which is due at most, and the map in it."""
    look = Product(2 * x.count, x.d, x.d, x.d)
    return [look, *eigenbasis_work(x.count, x.d, group, LATER_STEPS), *symmetric(x.count, x.d, x.d)]


# ---- state that several methods have in common ---------------------------------------------------


def momentum_and_square(x: Matrices, group: Group) -> Kept:
    """Two numbers for each element of the weight."""
    return {"momentum": x.elements, "square": x.elements}


def squares(x: Matrices, *kinds: str) -> Kept:
    """A d × d tensor of every kind ("factor", "map", …) for either side of every block."""
    sides = (("left", x.m), ("right", x.n))
    return {f"{side}_{kind}": x.count * d * d for side, d in sides for kind in kinds}


def momentum_factors_and_maps(x: Matrices, group: Group) -> Kept:
    """The state of a method with factors and maps made of the gradient."""
    bases = ("basis",) if isinstance(group.get("refresh_every"), Rotated) else ()
    return {**momentum(x, group), **squares(x, "factor", "map", *bases)}
