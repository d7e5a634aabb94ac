"""Second moments of rows: what capture measures, ranks add up, and geometry turns into factors."""

from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, [d, d] or [groups, d, d], and two float64 scalars.

    `count` rows were added up; the weight was used on `uses` rows, more where rows are sampled.
    """

    total: Tensor
    count: Tensor
    uses: Tensor


@dataclass(frozen=True)
class Statistics:
    """What one step's backward passes measured of a layer, the sums of Equation (9).

    A side that was not asked for or not seen is None. Layers that read the same tensors hold the
    *same* `inputs` object.
    """

    inputs: Moment | None  # Σ x xᵀ
    gradients: Moment | None  # Σ δ δᵀ


MomentShapes = tuple[Shape | None, Shape | None]  # of `inputs` and `gradients`; None: not asked for
