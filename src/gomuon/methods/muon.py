"""Muon with the exact polar factor, the paper's control."""

from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import PAPER, lerp_momentum, muon_scale, plain_polar, rate
from gomuon.recipes.work import StepWork, plain_polar_work

RECIPE = Recipe(
    "Muon",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=plain_polar,
    scale=muon_scale,
    settings={**rate(0.02), **PAPER},
    formula="D = polar(M̂)",
    origin="KellerJordan/Muon; exact polar and momentum .8 as the paper's control",
    official=(
        OfficialCode(
            "KellerJordan/Muon, muon.py",
            commit="1430c3495b60613a6bb6f035ef38456529443a14",
            ours={"momentum": 0.95},
        ),
    ),
    work=StepWork(plain_polar_work),
)


@register
class Muon(MatrixOptimizer):
    """Muon with the exact polar factor: Go-MUON at α = 0, the paper's control.

    W ← W − η √max(1, m/n) · polar(M̂).
    """

    recipe = RECIPE
