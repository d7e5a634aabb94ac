"""Symmetric products at less than their full price."""

from torch import Tensor


def symmetric_product(rows: Tensor) -> Tensor:
    """VᵀV of V [..., N, d]; blocks below the diagonal are mirrored instead of multiplied out."""
    d = rows.shape[-1]
    block = max(128, d // 16)  # wide enough for products to run at full speed
    if d < 2 * block:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], d, d)
    for begin in range(0, d, block):
        end = min(begin + block, d)
        strip = rows[..., begin:end].mT @ rows[..., begin:]
        product[..., begin:end, begin:] = strip
        product[..., end:, begin:end] = strip[..., end - begin :].mT
    return product
