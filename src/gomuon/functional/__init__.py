"""The mathematics of Go-MUON: tensors in, tensors out, batched over leading dimensions.

`left` and `right` are the symmetric positive-definite maps P_B (m×m) and P_A (n×n) of the paper;
`None` stands for the identity.
"""

from gomuon.functional import theory
from gomuon.functional.halfspace import halfspace_direction
from gomuon.functional.oracle import (
    frobenius_graft,
    inside_only_direction,
    matched_direction,
    weighted_norm,
)
from gomuon.functional.polar import polar
from gomuon.functional.roots import inverse_root
from gomuon.functional.shrinkage import oas, shrink

__all__ = [
    "frobenius_graft",
    "halfspace_direction",
    "inside_only_direction",
    "inverse_root",
    "matched_direction",
    "oas",
    "polar",
    "shrink",
    "theory",
    "weighted_norm",
]
