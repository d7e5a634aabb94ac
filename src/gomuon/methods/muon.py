"""Muon with the exact polar factor, the paper's control."""

from gomuon.geometry.base import Geometry
from gomuon.methods.recipe import Recipe
from gomuon.methods.registry import register
from gomuon.methods.stations import PAPER, lerp_momentum, muon_scale, plain_polar, rate
from gomuon.methods.work import StepWork, plain_polar_work
from gomuon.optimizer import MatrixOptimizer

RECIPE = Recipe(
    "Muon",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=plain_polar,
    scale=muon_scale,
    settings={**rate(0.02), **PAPER},
    formula="D = polar(M̂)",
    origin="KellerJordan/Muon; exact polar and momentum .8 as the paper's control",
    work=StepWork(plain_polar_work),
)


@register
class Muon(MatrixOptimizer):
    """Muon with the exact polar factor: Go-MUON at α = 0, the paper's control.

    W ← W − η √max(1, m/n) · polar(M̂).
    """

    recipe = RECIPE
