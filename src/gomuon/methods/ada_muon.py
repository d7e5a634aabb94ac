"""AdaMuon: Adam's second moments after the polar factor of the momentum's signs."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, lerp_momentum, measured_rms_scale, rate
from gomuon.recipes.work import StepWork, momentum_and_square, plain_polar_work
from gomuon.settings import DECAY, FLAG, POSITIVE, Setting, with_defaults


def adaptive_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = O/(√v̂ + ε), O = polar(sign(X)) or polar(X), v̂ the bias-corrected average of O²."""
    beta = group["square_decay"]
    O = polar(X.sign() if group["sign"] else X, group["polar"])
    v = stack.memory("square")
    stack.remember(v, v.lerp(O.square(), 1 - beta))
    return O / ((v / (1 - beta ** (stack.updates + 1))).sqrt() + group["eps"])


RECIPE = Recipe(
    "AdaMuon",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=adaptive_polar,
    scale=measured_rms_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.02),
        **with_defaults(MUON, weight_decay=0.01),
        "sign": Setting(True, FLAG),
        "square_decay": Setting(0.999, DECAY),
        "eps": Setting(1e-8, POSITIVE),
    },
    formula="D = O/(√v̂ + ε) with an RMS of .2, O = polar(sign(M̂)), v̂ the average of O²",
    origin="Si et al. 2025 (arXiv 2507.11005), Chongjie-Si/AdaMuon",
    official=(
        OfficialCode(
            "Chongjie-Si/AdaMuon, adamuon.py",
            "3b84e03186b7c58a5e4bf70175896bea7f4c5d4f",
            ours={"sign": False},
        ),
    ),
    departures=(
        "It takes the momentum's signs, as the paper's second version; the code does not.",
        "The length is measured with no ε.",
    ),
    work=StepWork(plain_polar_work, keeps=momentum_and_square),
)


@register
class AdaMuon(MatrixOptimizer):
    """AdaMuon: elementwise second moments of the polar factor, at the length of AdamW's updates.

    `sign=True` takes the polar factor of the momentum's signs, as the paper's second version says;
    its public code is `sign=False`. All other defaults are the code's. Where a gradient is zero but
    for rounding, its signs are those of rounding: `sign=False` does not enlarge it.
    """

    recipe = RECIPE
