"""Second moments of rows. Capture measures them, ranks add them up, geometry makes factors."""

from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, and two float64 scalars.

    Attributes:
        total: the sum, [d, d]; [strips, d, d] with one sum for each head or group; [strips, blocks,
            s, s] for a side in blocks; [strips, d, 1] or [strips, 1, d] for the diagonal of a left
            or right side.
        count: the number of rows in the sum.
        uses: the number of rows that the weight was applied to; larger if rows are sampled.
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
