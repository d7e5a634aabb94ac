"""Products of half precision with sums and results in float32, where the device has them.

The product of two bfloat16 or two float16 numbers is exact in float32. So such a product has the
error of a float32 product of the same numbers: only that of its sums. It is faster, and the numbers
are not copied.
"""

import torch
from torch import Tensor


def _devices_with_widening_products() -> frozenset[str]:
    """Those for which this torch has such products. CUDA has them from torch 2.8 on."""
    if torch.version.hip is not None or not hasattr(torch.ops.aten.mm, "dtype"):
        return frozenset()  # the first versions for ROCm wrote the wrong type
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(
        device
        for device in ("cuda", "xpu")
        if all(known(f"aten::{name}.dtype", device.upper()) for name in ("mm", "bmm"))
    )


_DEVICES = _devices_with_widening_products()  # once: a graph cannot ask


def has_widening_product(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether `widening_product` can multiply these rows, for a result of this dtype."""
    if dtype != torch.float32 or rows.device.type not in _DEVICES or not rows.numel():
        return False
    if rows.dtype == torch.float16:
        # The user may have allowed sums in float16, and a graph cannot ask.
        settings = torch.backends.cuda.matmul
        allowed = torch.compiler.is_compiling() or getattr(
            settings, "allow_fp16_accumulation", False
        )
        return not allowed
    return rows.dtype == torch.bfloat16


def widening_product(left: Tensor, right: Tensor) -> Tensor:
    """[..., m, k]·[..., k, n] of half precision, in float32. Both have the same leading shape."""
    if left.ndim == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    leading = left.shape[:-2]
    left, right = left.flatten(0, -3), right.flatten(0, -3)
    return torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, leading)
