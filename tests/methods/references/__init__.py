"""Every method once more, straight from its formula: one matrix, one loop, no batching.

Nothing of gomuon is used. The optimizers are compared with these; their defaults are the published
ones.
"""

from tests.methods.references.curvature import KLSOAP, QSD, SINGD, KLShampoo, SOAPMuon
from tests.methods.references.go_muon import GoMuon, NewtonMuon
from tests.methods.references.kfac import KFAC, KFACMuon, MatchedKFAC
from tests.methods.references.matched import FISMO, MALT, Mousse
from tests.methods.references.muon_family import (
    AdaMuon,
    Dion,
    Gluon,
    ModularConvolution,
    ModularEmbedding,
    ModularNorm,
    Moonlight,
    MuonHyperball,
    NorMuon,
    PolarExpressMuon,
    SAMuon,
)
from tests.methods.references.muons import Muon, MuonEq, MuonPlus, MuonSquared, Scion
from tests.methods.references.plain import Reference
from tests.methods.references.rotated import SOAP, Shampoo

__all__ = [
    "FISMO",
    "KFAC",
    "KLSOAP",
    "MALT",
    "QSD",
    "SINGD",
    "SOAP",
    "AdaMuon",
    "Dion",
    "Gluon",
    "GoMuon",
    "KFACMuon",
    "KLShampoo",
    "MatchedKFAC",
    "ModularConvolution",
    "ModularEmbedding",
    "ModularNorm",
    "Moonlight",
    "Mousse",
    "Muon",
    "MuonEq",
    "MuonHyperball",
    "MuonPlus",
    "MuonSquared",
    "NewtonMuon",
    "NorMuon",
    "PolarExpressMuon",
    "Reference",
    "SAMuon",
    "SOAPMuon",
    "Scion",
    "Shampoo",
]
