"""Go-MUON ("Second-Order Muon Done Right") as a PyTorch optimizer.

optimizer = gomuon.GoMuon(model, lr=0.08)
"""

from gomuon import functional
from gomuon.errors import DecompositionError, GeometryWarning, NonFiniteGradientError
from gomuon.methods import GoMuon, Halfspace, Muon, MuonQK

__version__ = "0.1.0"

__all__ = [
    "DecompositionError",
    "GeometryWarning",
    "GoMuon",
    "Halfspace",
    "Muon",
    "MuonQK",
    "NonFiniteGradientError",
    "functional",
]
