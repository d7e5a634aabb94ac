"""Go-MUON ("Second-Order Muon Done Right") as a PyTorch optimizer, and its rivals beside it.

optimizer = gomuon.GoMuon(model, lr=0.08)
"""

from gomuon import functional as functional
from gomuon import methods as _methods
from gomuon.errors import DecompositionError as DecompositionError
from gomuon.errors import GeometryWarning as GeometryWarning
from gomuon.errors import NonFiniteGradientError as NonFiniteGradientError
from gomuon.errors import RankError as RankError
from gomuon.methods import *  # noqa: F403
from gomuon.optimizer import MatrixOptimizer as MatrixOptimizer
from gomuon.parameters.specs import LayerSpec as LayerSpec

__version__ = "0.1.0"

__all__ = [
    "DecompositionError",
    "GeometryWarning",
    "LayerSpec",
    "MatrixOptimizer",
    "NonFiniteGradientError",
    "RankError",
    "__version__",
    "functional",
    *_methods.__all__,
]


def __dir__() -> list[str]:
    return sorted(__all__)
