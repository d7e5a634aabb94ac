"""Where the maps come from: one choice per class, each caching what it makes in the layers' state.

A geometry never clears a map: a layer that was not seen, or whose factor is unusable, keeps the one
it has, which Corollary 2 certifies as exact for its own ball.
"""

from gomuon.geometry.base import Geometry, Group
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.gradients import CoupledFactors, GradientGrams, RowColumnNorms
from gomuon.geometry.partner import PartnerGram
from gomuon.geometry.rotation import RotatingBasis

__all__ = [
    "CapturedMoments",
    "CoupledFactors",
    "Geometry",
    "GradientGrams",
    "Group",
    "PartnerGram",
    "RotatingBasis",
    "RowColumnNorms",
]
