"""The mathematics of Go-MUON: tensors in, tensors out, batched over leading dimensions.

`left` and `right` are the symmetric positive-definite maps P_B (m×m) and P_A (n×n) of the paper;
`None` stands for the identity.
"""

from gomuon.functional import theory
from gomuon.functional.checked import (
    frobenius_graft,
    inside_only_direction,
    inverse_root,
    matched_direction,
    oas,
    polar,
    shrink,
    weighted_norm,
)

__all__ = [
    "frobenius_graft",
    "inside_only_direction",
    "inverse_root",
    "matched_direction",
    "oas",
    "polar",
    "shrink",
    "theory",
    "weighted_norm",
]


def __dir__() -> list[str]:
    return __all__
