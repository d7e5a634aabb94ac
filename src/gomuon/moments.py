"""Second moments of rows. Capture measures them, ranks add them up, geometry makes factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, and two scalars.

    The scalars are on the CPU, where reading them waits for nothing. Only if a mask left rows out,
    or a compiled graph counted, are they on the moment's device.

    Attributes:
        total: the sum, [d, d]; [strips, d, d] with one sum for each head or group; [strips, blocks,
            s, s] for a side in blocks; [strips, d, 1] or [strips, 1, d] for the diagonal of a left
            or right side.
        count: the number of rows in the sum; [stack], if each matrix of a stack has its own.
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


class MomentShapes(NamedTuple):
    """Shapes of a layer's moments, None where nothing is captured, and how they travel.

    Attributes:
        inputs: of Σ x xᵀ.
        gradients: of Σ δ δᵀ.
        sent_as: the dtype in which ranks send their parts; None: as they are computed.
        stack: how many matrices have a number of rows of their own.
    """

    inputs: Shape | None
    gradients: Shape | None
    sent_as: torch.dtype | None = None
    stack: int = 1

    @property
    def counts(self) -> Shape:
        """The shape of the two numbers of rows."""
        return (2,) if self.stack == 1 else (2, self.stack)


NOT_CAPTURED = MomentShapes(None, None)


def count_dtype(device: torch.device) -> torch.dtype:
    """Of numbers of rows. Accelerators are slow in float64, or do not have it."""
    return torch.float64 if device.type == "cpu" else torch.float32


def stacked_counts(counts: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Numbers of rows as one tensor, where they are or on `device`. Waits for no accelerator.

    If some of them are on an accelerator, all go there.
    """
    places = {count.device for count in counts if count.device.type != "cpu"}
    if places:
        device = device or places.pop()
    elif device is None or device.type == "cpu":
        return torch.stack(list(counts))
    return torch.stack([_on(device, count) for count in counts])


def _on(device: torch.device, count: Tensor) -> Tensor:
    """A count on an accelerator. One that the host knows is filled in there: a copy would wait."""
    dtype = count_dtype(device)
    if count.device.type != "cpu":
        return count.to(device, dtype)
    numbers = count.flatten().tolist()
    filled = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
    return torch.stack(filled).view(count.shape)
