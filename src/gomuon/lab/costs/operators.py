"""Torch's operators: their FLOPs, what they decompose, and whether the host waits for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gomuon.recipes.work import DECOMPOSITIONS

# ---- decompositions ------------------------------------------------------------------------------

# FLOPs by routine, of m and n: leading terms, as in `recipes.work`.
ROUTINES: dict[str, Callable[[int, int], float]] = {
    **DECOMPOSITIONS,
    "eigvalsh": lambda n, _: 4 / 3 * n**3,
    "eig": lambda n, _: 25 * n**3,
    "eigvals": lambda n, _: 10 * n**3,
    "cholesky": lambda n, _: n**3 / 3,
    "lu": lambda m, n: min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "triangular solve": lambda m, n: m**2 * n,
    "factored solve": lambda m, n: 2 * m**2 * n,
    "reflections": lambda m, n: 2 * n**2 * (m - n / 3),  # of QR: made, written out or applied
}
# Operators by name -> their routine.
DECOMPOSING = {
    "_linalg_eigh": "eigh",
    "_linalg_svd": "svd",
    "linalg_qr": "qr",
    "linalg_inv_ex": "inv",
    "_linalg_solve_ex": "solve",
    "linalg_cholesky_ex": "cholesky",
    "cholesky": "cholesky",
    "cholesky_inverse": "inv",
    "linalg_ldl_factor_ex": "cholesky",
    "linalg_eig": "eig",
    "_linalg_eigvals": "eigvals",
    "linalg_lu": "lu",
    "linalg_lu_factor_ex": "lu",
    "_linalg_det": "lu",
    "_linalg_slogdet": "lu",
    "linalg_lstsq": "reflections",
    "linalg_householder_product": "reflections",
    "geqrf": "reflections",
    "ormqr": "reflections",
    "linalg_solve_triangular": "triangular solve",
    "triangular_solve": "triangular solve",
    "linalg_lu_solve": "factored solve",
    "linalg_ldl_solve": "factored solve",
    "_cholesky_solve_helper": "factored solve",
}
# Those that solve: the positions of the matrix and of its right-hand sides.
_SOLVING = {
    "_linalg_solve_ex": (0, 1),
    "linalg_solve_triangular": (0, 1),
    "triangular_solve": (1, 0),
    "linalg_lu_solve": (0, 2),
    "linalg_ldl_solve": (0, 2),
    "_cholesky_solve_helper": (1, 0),
}


@dataclass(frozen=True)
class Decomposed:
    """What one call decomposes: `count` matrices [m, n]; "solve" is S⁻¹X with X [m, n]."""

    routine: str
    count: int
    m: int
    n: int

    @property
    def flops(self) -> int:
        return self.count * round(ROUTINES[self.routine](self.m, self.n))


def decomposed(name: str, args: Sequence[Any], routine: str = "") -> Decomposed | None:
    """What the operator decomposes, if anything; `routine` if that is known better."""
    if name not in DECOMPOSING:
        return None
    routine = routine or DECOMPOSING[name]
    matrix, right_hand_sides = _SOLVING.get(name, (0, None))
    S: Tensor = args[matrix]
    count, (m, n) = S.shape[:-2].numel(), S.shape[-2:]
    if right_hand_sides is not None:
        n = args[right_hand_sides].numel() // max(1, count * m)
    return Decomposed(routine, count, m, n)


# ---- products ------------------------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))


# Formulas by operator. Torch's own table has no attention on the CPU.
PRODUCTS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **flop_registry,
}

# ---- waiting -------------------------------------------------------------------------------------

# The result, or the size of the result, is a value on the device.
_READING = {
    *("_local_scalar_dense", "equal", "allclose", "is_nonzero", "nonzero", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
_COPYING = {"_to_copy", "copy_", "_foreach_copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


def waits(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], devices: Collection[str]
) -> bool:
    """Whether the host waits for the device until the operator is done.

    It does if a value is read back, and if something is copied between the two in either direction
    and not `non_blocking`. `devices` are the types of its tensors' devices. For tensors on the CPU
    the answer is what it would be on another device.
    """
    if name in _COPYING:
        blocking = not (kwargs.get("non_blocking") or any(arg is True for arg in args[2:]))
        return blocking and len(devices) > 1
    if name in _INDEXING:
        masked = any(isinstance(i, Tensor) and i.dtype in _MASKS for i in args[1])
        # One number in place of all that a mask chooses is written without counting them.
        return masked and not (len(args) > 2 and args[2].numel() == 1)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _READING
