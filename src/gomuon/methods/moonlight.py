"""Moonlight's Muon: the length of AdamW's updates, and weight decay."""

from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, heavy_ball_momentum, plain_polar, rate, rms_scale
from gomuon.recipes.work import StepWork, plain_polar_work
from gomuon.settings import with_defaults

RECIPE = Recipe(
    "Moonlight",
    geometry=Geometry(),
    source=heavy_ball_momentum,
    direction=plain_polar,
    scale=rms_scale,
    settings={**rate(1e-3), **with_defaults(MUON, weight_decay=0.1)},
    formula="D = .2√max(m, n)·polar(M̂)",
    origin="Liu et al. 2025 (arXiv 2502.16982), MoonshotAI/Moonlight",
    official=(
        OfficialCode(
            "MoonshotAI/Moonlight, examples/toy_train.py",
            "abaa96ec0096e095b3195f7c0f1b3ffed945b281",
        ),
    ),
    departures=(
        "The length of a convolution is that of its matrix m × n; the code's, which asserts two "
        "dimensions first, would be .2√max(out, in) of the kernel.",
    ),
    work=StepWork(plain_polar_work),
)


@register
class Moonlight(MatrixOptimizer):
    """Moonlight's Muon: W ← (1 − ηλ)W − η·.2√max(m, n)·polar(M̂).

    Updates have the root mean square that AdamW's usually have, so its rate and its weight decay
    can be used, for example those of all other parameters: `lr_scale="adamw"`.
    """

    recipe = RECIPE
