"""Logits of attention: the largest of every head, and the factors that bring them to a threshold.

QK-clip is Algorithm 1 of the Kimi K2 report (arXiv 2507.20534).
"""

import torch
from torch import Tensor

from gomuon.functional.widening_products import has_widening_product, widening_product

# What is added to logits at positions that take no part is -inf or a large negative number. A bias
# of positions is nearer to zero than this.
MASKED = -5e3
_BLOCK = 2**23  # the most logits that exist at one time


def largest_logits(
    query: Tensor,
    key: Tensor,
    scale: float | Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """The largest scale·q_i·k_j of each head, over the batch and all pairs (i, j) that take part.

    Without what is added to logits, such as a bias of positions: it does not change with q and k.

    Args:
        query: [..., heads, l, d].
        key: [..., key heads, l', d]; each key head belongs to equally many neighbouring heads.
        scale: the factor of the product, 1/√d as a rule.
        mask: broadcasts to [..., heads, l, l']. Booleans: where a pair takes part. Numbers: what is
            added to logits; a pair takes part unless that is -inf or below -5000.
        is_causal: only pairs with j ≤ i take part.

    Returns:
        [heads], in float32 or wider. -inf where no pair takes part.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, length = query.shape[-3:-1]
    if key.shape[-3] not in (1, heads):
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
    if mask is not None and mask.ndim < 2:
        mask = mask.expand(1, mask.shape[-1] if mask.ndim else 1)
    largest = torch.full((heads,), -torch.inf, dtype=wide, device=query.device)
    if not (query.numel() and key.numel()):
        return largest
    columns = key.expand(*query.shape[:-2], *key.shape[-2:]).mT
    rows = max(1, _BLOCK // (query.shape[:-2].numel() * key.shape[-2]))
    for start in range(0, length, rows):
        block = slice(start, start + rows)
        S = _product(query[..., block, :], columns, wide) * scale
        visible = None if mask is None else _visible(_rows(mask, block))
        if is_causal:
            i = torch.arange(start, start + S.shape[-2], device=S.device)
            visible = i[:, None] >= torch.arange(S.shape[-1], device=S.device)
        if visible is not None:
            S = S.masked_fill(~visible, -torch.inf)
        largest = largest.maximum(S.amax((-2, -1)).reshape(-1, heads).amax(0))
    return largest


def _product(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    if has_widening_product(rows, dtype):
        return widening_product(rows.contiguous(), columns.contiguous())
    return rows.to(dtype) @ columns.to(dtype)


def _rows(mask: Tensor, block: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., block, :]


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > MASKED


def clip_factors(largest: Tensor, threshold: float) -> Tensor:
    """γ of each head: τ/S_max if S_max is above τ, else exactly 1.

    A maximum that is not finite says nothing, and gives 1.
    """
    above = largest.isfinite() & (largest > threshold)
    return torch.where(above, threshold / largest, 1.0)
