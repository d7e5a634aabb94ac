"""SOAP-Muon: the polar factor of SOAP's step, taken in SOAP's bases."""

import math

import torch
from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.rotating_basis import RotatingBasis
from gomuon.methods.soap import RECIPE as SOAP
from gomuon.methods.soap import (
    adam_mean,
    bases_work,
    bias_correction,
    first_bases_work,
    from_bases,
    grams_work,
    kept_by_adam_in_bases,
    rotation_work,
    scaled_in_bases,
    shrunk_with_weights,
)
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import Clock, Group, length, rate, to_length
from gomuon.recipes.work import Matrices, StepWork, Work, plain_polar_work
from gomuon.settings import FLAG, POLAR, Setting, with_defaults


def polar_in_bases(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L polar((Q_LᵀXQ_R)/(√v + ε)) Q_Rᵀ; with `square_root` of the polar's entries."""
    U = polar(scaled_in_bases(X, stack, group), group["polar"])
    if group["square_root"]:
        U = U.sign() * U.abs().sqrt()
    return from_bases(U, stack)


def unit_rms(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """D with a root mean square of one, times Adam's bias correction."""
    wanted = bias_correction(stack, group) * math.sqrt(math.prod(D.shape[-2:]))
    U = to_length(D, torch.full_like(length(D), wanted))
    return shrunk_with_weights(U, stack, group)


def _step_work(x: Matrices, group: Group) -> Work:
    """G and M into the bases, a polar factor, and the step back."""
    return 3 * bases_work(x, group) + plain_polar_work(x, group)


RECIPE = Recipe(
    "SOAPMuon",
    geometry=RotatingBasis(),
    clock=Clock(maps="refresh_every"),
    source=adam_mean,
    direction=polar_in_bases,
    scale=unit_rms,
    settings={
        **with_defaults(
            SOAP.settings,
            betas=(0.95, 0.98),
            eps=1e-15,
            weight_decay=0.0,
            factor_decay=0.98,
        ),
        **rate(1e-3),
        "polar": Setting("auto", POLAR),
        "square_root": Setting(False, FLAG),
    },
    formula="D = Q_L polar((Q_Lᵀ M Q_R)/(√v + ε)) Q_Rᵀ at a root mean square of one",
    origin="Vyas et al., nikhilvyas/SOAP_MUON, with the exact polar",
    official=(
        OfficialCode(
            "nikhilvyas/SOAP_MUON, olmo_optimimzer.py",
            commit="50bb9a817b48eae06e40b9c2917a251ecacd0242",
            theirs="an exact polar factor in place of its Newton–Schulz steps",
        ),
    ),
    departures=("Polar factors are exact or by Polar Express, not by ten Newton–Schulz steps.",),
    observes_first=1,
    work=StepWork(
        _step_work,
        observe=grams_work,
        renew=rotation_work,
        first=first_bases_work,
        keeps=kept_by_adam_in_bases,
    ),
)


@register
class SOAPMuon(MatrixOptimizer):
    """SOAP-Muon: SOAP's step is made orthogonal, and given a root mean square of one.

    As the authors' version for all layers of a model (`olmo_optimimzer.py`), with an exact polar
    factor for ten Newton–Schulz steps. The bias correction multiplies the step after it got its
    length, as there. Their other version, for modded-nanogpt, takes the signed square root of each
    entry of the polar factor in the bases (`square_root=True`) and Muon's length in place of the
    root mean square. Both bases are used, as by default there, or one (`max_side`).

    The first step only observes. `roots`, `max_side` and `refresh_every` are as in SOAP.
    """

    recipe = RECIPE
