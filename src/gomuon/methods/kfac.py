"""K-FAC: the natural gradient in Kronecker factors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.block_diagonal import padded
from gomuon.functional.factors import Root, RootBatch
from gomuon.functional.linalg import decompose, finite_factors, is_diagonal
from gomuon.functional.oracle import preconditioned
from gomuon.functional.orthonormal import FIRST_STEPS, LATER_STEPS, eigenbasis
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import map_batches
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.side_forms import LEFT, RIGHT
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    CAPTURE,
    MOMENTUM,
    ROOTS,
    Clock,
    Group,
    Pending,
    Total,
    gradient,
    momentum_after,
    rate,
)
from gomuon.recipes.work import (
    CapturedFactors,
    Factors,
    Matrices,
    StepWork,
    Work,
    eigenbasis_work,
    maps_work,
)
from gomuon.settings import (
    DECAY,
    INTERVAL,
    NOT_NEGATIVE,
    POSITIVE,
    Setting,
    optional,
    with_defaults,
)


def eigen_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """Eigenvectors and eigenvalues of both factors; a diagonal has its eigenvalues only.

    By products, a factor's first basis comes from the identity, and later ones from the last.
    """

    def store(side: str, layer: Layer, eigen: Tensor | None) -> bool:
        if eigen is None:
            return False
        form = layer.forms[LEFT if side == "left" else RIGHT]
        if form.kind == "diagonal":
            return layer.set_map(f"{side}_values", eigen.flatten(-2))
        # Rounding can make a zero eigenvalue negative; its products could exceed the damping.
        values, basis = eigen[..., 0, :].clamp_min(0), eigen[..., 1:, :].clone()
        return layer.set_map(f"{side}_values", values) and layer.set_map(f"{side}_basis", basis)

    batches: list[RootBatch] = []
    for side in ("left", "right"):
        new = [layer for layer in layers if f"{side}_basis" not in layer.state]
        old = [layer for layer in layers if f"{side}_basis" in layer.state]
        stored = partial(store, side)
        batches += map_batches(new, side, EIGEN, stored)
        batches += map_batches(old, side, EIGEN, stored, start=f"{side}_basis")
    return batches


# Values and vectors are packed as one tensor [values; vectors], because a factor has one result.


def decomposed(S: Tensor) -> Tensor:
    if is_diagonal(S):
        return S
    return _packed(*decompose(torch.linalg.eigh, S))


def iterated(S: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By orthogonal iteration, and which results are finite: it cannot fail otherwise."""
    found = _packed(*eigenbasis(S, FIRST_STEPS if start is None else LATER_STEPS, start))
    return found, finite_factors(found)


def _packed(values: Tensor, vectors: Tensor) -> Tensor:
    return torch.cat([values.unsqueeze(-2), vectors], dim=-2)


EIGEN = Root(decomposed, iterated)


def natural_gradient(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = V_B[(V_Bᵀ X V_A)/(λ_B λ_Aᵀ + damping)]V_Aᵀ."""
    V_B, V_A = stack.map("left_basis"), stack.map("right_basis")
    values_B, values_A = stack.map("left_values"), stack.map("right_values")
    if values_B is None and values_A is None:
        return X  # nothing was captured: identity maps, as in every geometry
    m, n = X.shape[-2:]
    # A side that is not captured is the identity, with eigenvalues of one.
    lambda_B = X.new_ones(len(X), m) if values_B is None else values_B.flatten(1)
    lambda_A = X.new_ones(len(X), n) if values_A is None else values_A.flatten(1)
    # In the eigenbasis of a padded block its further coordinates may stand anywhere.
    X = padded(padded(X, -2, lambda_B.shape[1]), -1, lambda_A.shape[1])
    rotated = preconditioned(X, None if V_B is None else V_B.mT, V_A)
    damped = lambda_B.unsqueeze(-1) * lambda_A.unsqueeze(-2) + group["damping"]
    D = preconditioned(rotated / damped, V_B, None if V_A is None else V_A.mT)
    return D[..., :m, :n]


def kl_clip(pending: Iterable[Pending], group: Group, total: Total) -> Iterator[Pending]:
    """D·min(1, √(clip/|Σ lr²⟨G, D⟩|)), the sum over every layer of the group."""
    waiting = list(pending)
    factor: Tensor | float = 1.0
    if group["kl_clip"] is not None:
        products = _summed([(stack.G * D).sum() / stack.copies for stack, _, D in waiting])
        change = (group["lr"] ** 2 * total(products)).abs()
        # If the sum overflows, the change is above any budget, and nothing moves.
        factor = (group["kl_clip"] / change).sqrt().nan_to_num(0.0, posinf=1.0).clamp(max=1.0)
    for stack, X, D in waiting:
        yield stack, X, factor * D


def _summed(numbers: Sequence[Tensor]) -> Tensor:
    """In float64 on the CPU; in their own precision on accelerators, which are slow in float64."""
    if not numbers or linalg.decomposes_well(numbers[0].device):
        none = torch.zeros((), dtype=torch.float64, device="cpu")  # if this rank owns no matrix
        return sum((number.double() for number in numbers), none)
    return torch.stack([number.to(numbers[0].device) for number in numbers]).sum()


def _step_work(x: Matrices, group: Group) -> Work:
    """Into both eigenbases and back, with padded blocks."""
    B, A = x.form(LEFT), x.form(RIGHT)
    whole = replace(x, m=B.blocks * B.size, n=A.blocks * A.size)
    return 2 * maps_work(whole, *x.captured)


def _eigen_work(x: Factors, group: Group) -> Work:
    return eigenbasis_work(x.count, x.d, group, LATER_STEPS)


def _first_eigen_work(x: Factors, group: Group) -> Work:
    return eigenbasis_work(x.count, x.d, group, FIRST_STEPS)


RECIPE = Recipe(
    "KFAC",
    geometry=CapturedMoments(eigen_maps, start=1.0),
    clock=Clock(statistics="statistics_every", maps="refresh_every"),
    source=gradient,
    direction=natural_gradient,
    trust=kl_clip,
    scale=momentum_after,
    settings={
        **rate(0.1),
        **with_defaults(MOMENTUM, momentum=0.9, nesterov=False),
        "factor_decay": Setting(0.95, DECAY),
        "damping": Setting(1e-3, NOT_NEGATIVE),
        "kl_clip": Setting(1e-3, optional(POSITIVE)),
        "statistics_every": Setting(1, INTERVAL),
        "refresh_every": Setting(1, INTERVAL),
        **CAPTURE,
        **ROOTS,
    },
    formula="D = V_B[(V_Bᵀ G V_A)/(λ_B λ_Aᵀ + damping)]V_Aᵀ, clipped to a KL budget, then momentum",
    origin="Martens & Grosse 2015; numbers of gpauloski/kfac-pytorch",
    official=(
        OfficialCode(
            "gpauloski/kfac-pytorch, kfac/preconditioner.py",
            commit="dae45024c9d86872d1ba6b6f011ca86aac84aee9",
            ours={"loss_reduction": "sum"},
            theirs="torch.optim.SGD(lr=0.1, momentum=0.9) after it",
        ),
    ),
    departures=(
        'By default (`loss_reduction="mean"`) output gradients are multiplied by the number of '
        "rows that the loss averages over; kfac-pytorch takes them as they come.",
        "Factors of convolutions are means over positions; kfac-pytorch divides inputs and output "
        "gradients by their number once more.",
    ),
    joins_bias=True,
    work=StepWork(
        _step_work,
        captured=CapturedFactors(
            _eigen_work,
            _first_eigen_work,
            one_for="layer",
            map_elements=lambda d: d * d + d,
        ),
    ),
)


@register
class KFAC(MatrixOptimizer):
    """K-FAC, the natural gradient in Kronecker factors, with a KL budget over all layers.

    Biases of linear layers join their weights as a column; inputs then end with a one. A side
    without a factor (`max_side`) has eigenvalues of one. `roots` says how eigenvectors are found.
    "eigh" decomposes. "products" estimates them by orthogonal iteration, 20 steps from the identity
    at a layer's first refresh and 2 steps from the last basis at later ones. "auto" is "products"
    on accelerators and "eigh" on the CPU. With any orthonormal basis and positive values the step's
    map is positive definite, and eigenvectors of nearly equal eigenvalues hardly change it if they
    are mixed.

    `loss_reduction="sum"` takes output gradients as they come, as kfac-pytorch does. It is not the
    default, because B would then shrink with the square of the batch, and `damping` would mean
    something else for every batch size.
    """

    recipe = RECIPE
