"""KL-Shampoo and KL-SOAP: Shampoo and SOAP with factors that whiten each other."""

from torch import Tensor

from gomuon.geometry.coupled_basis import CoupledBasis, inverse_roots, scaled
from gomuon.methods.soap import RECIPE as SOAP
from gomuon.methods.soap import (
    adam_mean,
    bases_work,
    factors_and_bases,
    first_bases_work,
    from_bases,
    grams_work,
    into_bases,
    rotation_work,
    scaled_in_bases,
    shrunk_with_weights,
    sides_of,
)
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MOMENTUM, Clock, Group, lerp_momentum, rate
from gomuon.recipes.work import (
    Kept,
    Matrices,
    StepWork,
    Work,
    momentum,
    momentum_and_square,
)
from gomuon.settings import NOT_NEGATIVE, POSITIVE, Setting, Settings, optional, with_defaults

FACTORS: Settings = {
    "factor_decay": SOAP.settings["factor_decay"],
    "first_values": Setting(0.1, POSITIVE),
    "clamp": Setting(4000.0, optional(POSITIVE)),
    **{name: SOAP.settings[name] for name in ("refresh_every", "max_side", "roots")},
}
ORIGIN = "Lin et al. 2025 (arXiv 2509.03378), yorkerlin/KL-Methods"


def official(*, soap: bool) -> tuple[OfficialCode, ...]:
    return (
        OfficialCode(
            "yorkerlin/KL-Methods, optim/kl_opt.py",
            commit="4cb97e038432f2fe8992fca241d4857ce6eeada7",
            theirs=f"using_klsoap={soap}, cast_dtype=torch.float32",
        ),
    )


def whitened_in_bases(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L[(Q_LᵀXQ_R)/(√(λ_Lλ_Rᵀ) + ε)]Q_Rᵀ, which is L^(−½) X R^(−½) for ε = 0."""
    scales = scaled(scaled(X.new_ones(()), inverse_roots(stack, "left")),
                    inverse_roots(stack, "right"))  # fmt: skip
    # Not 1/(1/scale + ε): an eigenvalue of zero has a scale of zero.
    return from_bases(into_bases(X, stack) * (scales / (1 + group["eps"] * scales)), stack)


def adam_in_bases(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L[(Q_LᵀMQ_R)/(√v + ε)]Q_Rᵀ, v the average of (Q_LᵀGQ_R)²; no bias correction."""
    return from_bases(scaled_in_bases(X, stack, group), stack)


# ---- costs ---------------------------------------------------------------------------------------


def _coupled_work(x: Matrices, group: Group) -> Work:
    """G into either basis, and from the left one into both, and two Grams."""
    each = bases_work(x, group)
    both = each[1:] if len(sides_of(x, group)) == 2 else []
    return [*each, *both, *grams_work(x, group)]


def _turning_work(x: Matrices, group: Group) -> Work:
    return rotation_work(x, group, is_sorted=False)


def _whitening_work(x: Matrices, group: Group) -> Work:
    """M into the bases, and the step back."""
    return 2 * bases_work(x, group)


def _adam_work(x: Matrices, group: Group) -> Work:
    """G and M into the bases, and the step back."""
    return 3 * bases_work(x, group)


def _factors(x: Matrices, group: Group) -> Kept:
    values = {f"{side}_values": x.count * d for side, d, _ in sides_of(x, group)}
    return {**factors_and_bases(x, group), **values}


def _kept_by_shampoo(x: Matrices, group: Group) -> Kept:
    return {**momentum(x, group), **_factors(x, group)}


def _kept_by_soap(x: Matrices, group: Group) -> Kept:
    return {**momentum_and_square(x, group), **_factors(x, group)}


# ---- recipes -------------------------------------------------------------------------------------

KL_SHAMPOO = Recipe(
    "KLShampoo",
    geometry=CoupledBasis(),
    clock=Clock(maps="refresh_every"),
    source=lerp_momentum,
    direction=whitened_in_bases,
    scale=shrunk_with_weights,
    settings={
        **rate(1e-4),
        **with_defaults(MOMENTUM, momentum=0.9, nesterov=False, weight_decay=0.01),
        "eps": Setting(1e-8, NOT_NEGATIVE),
        **with_defaults(FACTORS, factor_decay=0.98),
    },
    formula="D = L^−½ M R^−½;  L the average of G R⁻¹Gᵀ/n, R that of Gᵀ L⁻¹G/m",
    origin=ORIGIN,
    official=official(soap=False),
    observes_first=1,
    work=StepWork(
        _whitening_work,
        observe=_coupled_work,
        renew=_turning_work,
        first=first_bases_work,
        keeps=_kept_by_shampoo,
    ),
)
KL_SOAP = Recipe(
    "KLSOAP",
    geometry=CoupledBasis(),
    clock=Clock(maps="refresh_every"),
    source=adam_mean,
    direction=adam_in_bases,
    scale=shrunk_with_weights,
    settings={
        **with_defaults(SOAP.settings, betas=(0.9, 0.98)),
        **rate(1e-4),
        **with_defaults(FACTORS, factor_decay=0.98),
    },
    formula="D = Q_L[(Q_Lᵀ M Q_R)/(√v + ε)]Q_Rᵀ in the bases of L and R of KL-Shampoo",
    origin=ORIGIN,
    official=official(soap=True),
    observes_first=1,
    work=StepWork(
        _adam_work,
        observe=_coupled_work,
        renew=_turning_work,
        first=first_bases_work,
        keeps=_kept_by_soap,
    ),
)


@register
class KLShampoo(MatrixOptimizer):
    """KL-Shampoo: factors that minimise a Kullback–Leibler divergence, and no graft.

    L is the average of G R⁻¹Gᵀ/n and R that of Gᵀ L⁻¹G/m, each with the other's inverse of the step
    before. Eigenvectors follow by a power step and QR every `refresh_every` steps, eigenvalues are
    averaged in every step from `first_values` on. An inverse root of an eigenvalue is at most
    max(10, min(d, `clamp`)) for a side of length d; `clamp=None` lets it grow. The authors' code
    computes in bfloat16 by default (`cast_dtype`), ours in float32 or wider.

    The first step only observes. `roots`, `max_side` and `refresh_every` are as in SOAP.
    """

    recipe = KL_SHAMPOO


@register
class KLSOAP(MatrixOptimizer):
    """KL-SOAP: Adam without bias correction in the eigenbases of KL-Shampoo's factors.

    Settings of the factors are those of KLShampoo. The authors keep the momentum in the bases and
    turn it with them; ours is kept in the original coordinates, which is the same step.
    """

    recipe = KL_SOAP
