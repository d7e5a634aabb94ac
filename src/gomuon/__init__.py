"""Go-MUON ("Second-Order Muon Done Right") as a PyTorch optimizer, and its rivals beside it.

optimizer = gomuon.GoMuon(model, lr=0.08)
"""

from gomuon import functional
from gomuon.errors import DecompositionError, GeometryWarning, NonFiniteGradientError, RankError
from gomuon.layers import LayerSpec
from gomuon.methods import (
    FISMO,
    KFAC,
    MALT,
    SOAP,
    GoMuon,
    Halfspace,
    KFACMuon,
    Mousse,
    Muon,
    MuonEq,
    MuonPlus,
    MuonQK,
    MuonSquared,
    NewtonMuon,
    Scion,
    Shampoo,
)

__version__ = "0.1.0"

__all__ = [
    "FISMO",
    "KFAC",
    "MALT",
    "SOAP",
    "DecompositionError",
    "GeometryWarning",
    "GoMuon",
    "Halfspace",
    "KFACMuon",
    "LayerSpec",
    "Mousse",
    "Muon",
    "MuonEq",
    "MuonPlus",
    "MuonQK",
    "MuonSquared",
    "NewtonMuon",
    "NonFiniteGradientError",
    "RankError",
    "Scion",
    "Shampoo",
    "functional",
]
