"""Every method once more, straight from its formula: one matrix, one loop, no batching.

Nothing of gomuon is used. The optimizers are compared with these; their defaults are the published
ones.
"""

from tests.references.go_muon import GoMuon, NewtonMuon
from tests.references.kfac import KFAC, KFACMuon
from tests.references.matched import FISMO, MALT, Mousse
from tests.references.muons import Muon, MuonEq, MuonPlus, MuonSquared, Scion
from tests.references.plain import Reference
from tests.references.rotated import SOAP, Shampoo

__all__ = [
    "FISMO",
    "KFAC",
    "MALT",
    "SOAP",
    "GoMuon",
    "KFACMuon",
    "Mousse",
    "Muon",
    "MuonEq",
    "MuonPlus",
    "MuonSquared",
    "NewtonMuon",
    "Reference",
    "Scion",
    "Shampoo",
]
