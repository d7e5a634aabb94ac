"""Matrix products and decompositions as data, with their numbers of operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    """`count` decompositions of [m, n] matrices by LAPACK or a similar library."""

    count: int
    routine: str
    m: int
    n: int

    @property
    def flops(self) -> int:
        """The textbook's leading terms: an estimate, not a count of a library's operations."""
        return self.count * DECOMPOSITIONS[self.routine](self.m, self.n)


Operation = Product | Decomposition
Work = list[Operation]


def _svd_flops(m: int, n: int) -> int:
    """U, Σ, V of the compact SVD: the better of Golub–Reinsch and R-SVD."""
    m, n = max(m, n), min(m, n)
    return min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)


# Golub & Van Loan, Matrix Computations, 4th edition, sections 4.2, 8.3 and 8.6.
DECOMPOSITIONS: dict[str, Callable[[int, int], int]] = {
    "eigh": lambda n, _: 9 * n**3,
    "svd": _svd_flops,
}


def flops(work: Sequence[Operation]) -> int:
    return sum(operation.flops for operation in work)


def symmetric(count: int, d: int, rows: int) -> Work:
    """VᵀV of V [rows, d] as in `symmetric_product`: strips that cover little more than half."""
    block = max(128, d // 16)
    block = block if d >= 2 * block else d
    return [Product(count, min(block, d - begin), rows, d - begin) for begin in range(0, d, block)]


# The number of steps in float32 and float64. The last four separate the null space.
POLAR_EXPRESS_STEPS = {False: 18, True: 50}


def polar_work(count: int, m: int, n: int, method: str, *, float64: bool = False) -> Work:
    """The polar factor as computed by `functional.polar`; `method` is not "auto".

    For well-conditioned matrices. Others need a few more products.
    """
    short, long = min(m, n), max(m, n)
    if method == "polar-express":
        steps = count * POLAR_EXPRESS_STEPS[float64]  # YYᵀ, its square, (bYYᵀ + c(YYᵀ)²)Y
        shapes = ((short, long, short), (short, short, short), (short, short, long))
        return [*(Product(steps, *shape) for shape in shapes)]
    if float64:
        return [Decomposition(count, "svd", m, n), Product(count, m, short, n)]
    return [  # through the Gram matrix: YᵀY, Y·(V·λ^(−½)·Vᵀ)
        *symmetric(count, short, long),
        Decomposition(count, "eigh", short, short),
        Product(count, short, short, short),
        Product(count, long, short, short),
    ]
