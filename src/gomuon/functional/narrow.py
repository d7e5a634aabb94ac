"""Numbers in fewer bits: bfloat16, and 8 bits with one scale for every block."""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128  # elements with one scale
LARGEST = 127  # of the codes; -128 is not used, so that they are symmetric


def blocks_of(elements: int) -> int:
    """The number of scales for so many elements."""
    return -(-elements // BLOCK)


def to_codes(X: Tensor) -> tuple[Tensor, Tensor]:
    """Codes c, int8 like X [b, …], and scales s, float32 [b, blocks]: X ≈ c·|c|·s.

    Each X[i] is flattened and cut into blocks of 128 elements; the last one may be shorter. Codes
    are quadratic, so that the small elements of a block keep some digits: an element x is wrong by
    at most √(x·s) + s/4, with s the largest magnitude divided by 127². A block with NaN or infinity
    becomes NaN.
    """
    flat = X.flatten(1).float()
    size = flat.shape[1]
    padded = F.pad(flat, (0, blocks_of(size) * BLOCK - size)).unflatten(1, (-1, BLOCK))
    scales = padded.abs().amax(-1) / LARGEST**2
    # Of a scale below the normal numbers the quotient may be larger than 127².
    roots = (padded.abs() / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)).sqrt_()
    rounded = roots.nan_to_num_(0.0).round_().clamp_(max=LARGEST)
    codes = rounded.copysign_(padded).to(torch.int8)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return codes.flatten(1)[:, :size].reshape(X.shape), scales


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """c·|c|·s in this dtype; the reverse of `to_codes`."""
    size = codes[0].numel()
    flat = codes.reshape(len(codes), -1).to(dtype)
    padded = F.pad(flat, (0, scales.shape[1] * BLOCK - size)).unflatten(1, (-1, BLOCK))
    values = padded * padded.abs() * scales.unsqueeze(-1).to(dtype)
    return values.flatten(1)[:, :size].reshape(codes.shape)


def to_bfloat16(X: Tensor, turn: int) -> Tensor:
    """X in bfloat16, rounded up or down at a threshold that differs from turn to turn.

    Rounded to nearest, a slow average stops: what is added in one turn is less than half a unit in
    the last place. Here the thresholds of successive turns are evenly spread over a unit, so that
    what is too small for one turn is added in one of many. The threshold is the same for all
    elements, so a symmetric matrix stays symmetric. It depends on nothing but `turn`.
    """
    threshold = int(((turn + 1) * _GOLDEN) % 1.0 * 2**16)
    bits = X.float().contiguous().view(torch.int32)
    rounded = ((bits + threshold) & ~0xFFFF).view(torch.float32)
    return torch.where(X.isfinite(), rounded, X.float()).to(torch.bfloat16)


_GOLDEN = 0.6180339887498949  # its multiples modulo one are spread as evenly as can be
