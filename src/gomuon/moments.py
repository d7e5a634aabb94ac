"""Second moments of rows. Capture measures them, ranks add them up, geometry makes factors."""

from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, [d, d] or [groups, d, d], and two float64 scalars.

    `count` is the number of rows in the sum. `uses` is the number of rows that the weight was
    applied to; it is larger if rows are sampled.
    """

    total: Tensor
    count: Tensor
    uses: Tensor


@dataclass(frozen=True)
class Statistics:
    """The sums of Equation (9) for one layer, from the backward passes of one step.

    A side that is not captured or has no data is None. Layers that read the same tensors have the
    *same* `inputs` object.
    """

    inputs: Moment | None  # Σ x xᵀ
    gradients: Moment | None  # Σ δ δᵀ


MomentShapes = tuple[Shape | None, Shape | None]  # of `inputs` and `gradients`; None: not captured
