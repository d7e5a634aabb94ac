"""The methods, each one value per axis."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gomuon.axes import halfspace, lerp_momentum, matched_polar, muon_scale
from gomuon.geometry import Geometry, Group, KroneckerMoments, PartnerGram

Source = Callable[[Tensor, Tensor, Group], tuple[Tensor, Tensor]]
Direction = Callable[[Tensor, Tensor | None, Tensor | None, Group], Tensor]
Scale = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What a method does at each station of the walk."""

    name: str
    geometry: Geometry | None
    source: Source
    direction: Direction
    scale: Scale


GO_MUON = Recipe("Go-MUON", KroneckerMoments(), lerp_momentum, matched_polar, muon_scale)
MUON = Recipe("Muon", None, lerp_momentum, matched_polar, muon_scale)
# The paper's two undefined controls, each a reading.
MUON_QK = Recipe("Muon + Q/K", PartnerGram(), lerp_momentum, matched_polar, muon_scale)
HALFSPACE = Recipe("halfspace", KroneckerMoments(), lerp_momentum, halfspace, muon_scale)
