"""The patches that a convolution reads, one for each output position."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Padding = Sequence[tuple[int, int]]  # zeros before and after each dimension


def all_patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
) -> Tensor:
    """All patches of x [batch, channels, space…]: [batch, outputs, channels, kernel…]."""
    dims = len(kernel)
    x = F.pad(x, [size for pair in reversed(padding) for size in pair])
    for dim, (size, step, distance) in enumerate(
        zip(kernel, stride, dilation, strict=True), start=2
    ):
        x = x.unfold(dim, distance * (size - 1) + 1, step)[..., ::distance]
    return x.movedim(1, 1 + dims).flatten(1, dims)


def patches_at(
    x: Tensor,
    example: Tensor,
    position: Sequence[Tensor],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
) -> Tensor:
    """The patches of some outputs only. Nothing of the size of the batch is copied.

    Args:
        x: [batch, channels, space…] the convolution's input, without padding.
        example: [N] the outputs' examples.
        position: [N] their coordinates, for each dimension of space.
        kernel: the sizes of the kernel.
        stride: the convolution's strides.
        padding: the convolution's padding with zeros.
        dilation: the distances between the kernel's points.

    Returns:
        [N, channels, kernel…].
    """
    dims = len(kernel)
    inside: Tensor | None = None
    places = []
    for dim in range(dims):
        points = torch.arange(kernel[dim], device=x.device) * dilation[dim] - padding[dim][0]
        place = position[dim].unsqueeze(-1) * stride[dim] + points  # [N, kernel[dim]]
        place = place.reshape(-1, *[kernel[dim] if axis == dim else 1 for axis in range(dims)])
        if any(padding[dim]):
            size = x.shape[2 + dim]
            here = (place >= 0) & (place < size)
            inside = here if inside is None else inside & here
            place = place.clamp(0, size - 1)
        places.append(place)
    example = example.reshape(-1, *[1] * dims)
    patches = x.movedim(1, -1)[(example, *places)]  # [N, kernel…, channels]
    if inside is not None:
        # Not a product with zero, which would keep NaN.
        patches.masked_fill_(~inside.unsqueeze(-1), 0)
    return patches.movedim(-1, 1)
