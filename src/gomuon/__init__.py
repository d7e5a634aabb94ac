"""Go-MUON ("Second-Order Muon Done Right") as a PyTorch optimizer, and related methods.

optimizer = gomuon.GoMuon(model, lr=0.08)
"""

# ruff: noqa: I001 (methods are in the order of the paper's table; all tables use this order)
from gomuon import functional as functional
from gomuon.errors import DecompositionError as DecompositionError
from gomuon.errors import GeometryWarning as GeometryWarning
from gomuon.errors import NonFiniteGradientError as NonFiniteGradientError
from gomuon.errors import RankError as RankError
from gomuon.intervals import Adaptive as Adaptive
from gomuon.intervals import Rotated as Rotated

from gomuon.methods.muon import Muon as Muon
from gomuon.methods.kfac import KFAC as KFAC
from gomuon.methods.shampoo import Shampoo as Shampoo
from gomuon.methods.soap import SOAP as SOAP
from gomuon.methods.mousse import Mousse as Mousse
from gomuon.methods.fismo import FISMO as FISMO
from gomuon.methods.go_muon import GoMuon as GoMuon
from gomuon.methods.newton_muon import NewtonMuon as NewtonMuon
from gomuon.methods.muon_squared import MuonSquared as MuonSquared
from gomuon.methods.malt import MALT as MALT
from gomuon.methods.muon_plus import MuonPlus as MuonPlus
from gomuon.methods.muon_eq import MuonEq as MuonEq
from gomuon.methods.scion import Scion as Scion
from gomuon.methods.kfac_muon import KFACMuon as KFACMuon
from gomuon.methods.matched_kfac import MatchedKFAC as MatchedKFAC
from gomuon.methods.muon_qk import MuonQK as MuonQK
from gomuon.methods.halfspace import Halfspace as Halfspace
from gomuon.methods.moonlight import Moonlight as Moonlight
from gomuon.methods.polar_express_muon import PolarExpressMuon as PolarExpressMuon
from gomuon.methods.nor_muon import NorMuon as NorMuon
from gomuon.methods.ada_muon import AdaMuon as AdaMuon
from gomuon.methods.sa_muon import SAMuon as SAMuon
from gomuon.methods.muon_hyperball import MuonHyperball as MuonHyperball
from gomuon.methods.dion import Dion as Dion
from gomuon.methods.modular_norm import ModularNorm as ModularNorm
from gomuon.methods.gluon import Gluon as Gluon
from gomuon.methods.soap_muon import SOAPMuon as SOAPMuon
from gomuon.methods.kl_shampoo import KLShampoo as KLShampoo
from gomuon.methods.kl_shampoo import KLSOAP as KLSOAP
from gomuon.methods.singd import SINGD as SINGD
from gomuon.methods.qsd import QSD as QSD

from gomuon.recipes.registry import METHODS as _METHODS
from gomuon.optimizer import MatrixOptimizer as MatrixOptimizer
from gomuon.parameters.specs import LayerSpec as LayerSpec
from gomuon.qk_clip import QKClip as QKClip

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "DecompositionError",
    "GeometryWarning",
    "LayerSpec",
    "MatrixOptimizer",
    "NonFiniteGradientError",
    "QKClip",
    "RankError",
    "Rotated",
    "functional",
    *_METHODS,
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
