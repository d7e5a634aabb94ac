"""The half-space control of the paper's map-back study: an interpretation.

The paper calls it the "registered halfspace baseline" and does not define it.
"""

import math

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import attempt
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import PolarMethod, polar
from gomuon.methods.go_muon import FACTORS, GEOMETRY
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import CURVATURE, PAPER, Clock, Group, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import (
    Decomposition,
    Matrices,
    StepWork,
    Work,
    decay_work,
    maps_work,
    plain_polar_work,
)
from gomuon.settings import DECAY, Setting, with_defaults


def halfspace_direction(
    M: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    *,
    tau: float = 0.0,
    polar_method: PolarMethod = "svd",
    bisections: int | None = None,
) -> Tensor:
    """Inside-only score with a half-space safeguard: the maximiser of ⟨Z, U⟩, Z = P_B M P_A.

    Over ‖U‖_op ≤ 1 and ⟨M, U⟩ ≥ τ‖M‖_*. By Lagrange duality it is polar(Z + λM) with the smallest
    λ ≥ 0 that meets the second constraint, found by bisection. If Z + λM is singular for this λ,
    its polar jumps over the constraint. Then the mixture of both sides is used that meets the
    constraint exactly.

    On the CPU only matrices that violate the constraint are bisected. Accelerators are not asked
    which ones do: there all matrices are, always by the same number of polar factors.

    Args:
        M: [..., m, n] the source.
        left: [..., m, m] P_B = B^(−1/2) in the study, or None.
        right: [..., n, n] P_A = A^(−1/2), or None.
        tau: the fraction of ‖M‖_* to keep, in [0, 1).
        polar_method: see `polar`.
        bisections: how many times the interval around λ is halved; by default 30 times, on
            accelerators 16 times.
    """
    Z = preconditioned(M, left, right)
    U = polar(Z, polar_method)
    if not linalg.decomposes_well(M.device):
        halvings = _HALVINGS_UNASKED if bisections is None else bisections
        return _without_asking(M, Z, U, tau, polar_method, halvings)
    wanted = M.new_zeros(M.shape[:-2])
    if tau:
        wanted = tau * attempt(torch.linalg.matrix_norm, M, ord="nuc")
    violated = _inner(M, U) < wanted
    if not bool(violated.any()):
        return U
    # Only matrices that violate the constraint are bisected.
    halvings = _HALVINGS if bisections is None else bisections
    U[violated] = _bisect(M[violated], Z[violated], wanted[violated], polar_method, halvings)
    return U


_HALVINGS = 30
# In float32 further halvings change the result by no more than rounding; where the polar jumps, by
# about 3e-5. The constraint is met after any number.
_HALVINGS_UNASKED = 16


def _without_asking(
    M: Tensor, Z: Tensor, U: Tensor, tau: float, method: PolarMethod, halvings: int
) -> Tensor:
    """The same as fixed work for every matrix: nothing is read, and no size depends on a number.

    U = polar(Z). Instead of λ from 0 to ∞, the angle φ of cos φ·Z + sin φ·M from 0 to π/2 is
    bisected, both matrices scaled to a largest entry of one. So an upper bound is known: polar(M),
    which attains ‖M‖_* = ⟨M, polar(M)⟩.
    """
    M, Z = _to_entries_of_one(M), _to_entries_of_one(Z)  # no scale matters to polar factors
    below, above = U, polar(M, method)
    wanted = tau * _inner(M, above)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, math.pi / 2)
    for _ in range(halvings):
        middle = (low + high) / 2
        cosine, sine = middle.cos()[..., None, None], middle.sin()[..., None, None]
        candidate = polar(cosine * Z + sine * M, method)
        enough = _inner(M, candidate) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        below, above = _choose(enough, below, candidate), _choose(enough, candidate, above)
    return _choose(_inner(M, U) < wanted, _mixture(M, below, above, wanted), U)


def _to_entries_of_one(X: Tensor) -> Tensor:
    """X with a largest entry of one; 0 stays 0."""
    largest = X.abs().amax(dim=(-2, -1), keepdim=True)
    return X / torch.where(largest == 0, 1.0, largest)


def _bisect(M: Tensor, Z: Tensor, wanted: Tensor, method: PolarMethod, bisections: int) -> Tensor:
    def at(multiplier: Tensor) -> tuple[Tensor, Tensor]:
        U = polar(Z + multiplier[:, None, None] * M, method)
        return U, _inner(M, U) >= wanted

    low, below = torch.zeros_like(wanted), polar(Z, method)
    # ⟨M, polar(Z + λM)⟩ grows with λ and tends to ‖M‖_*, so doubling λ finds an upper bound.
    high = torch.linalg.matrix_norm(Z) / torch.linalg.matrix_norm(M)
    high = torch.where((high > 0) & high.isfinite(), high, 1.0)  # norms may under- or overflow
    above, enough = at(high)
    for _ in range(_doublings(M.dtype)):
        if bool(enough.all()):
            break
        low, below = torch.where(enough, low, high), _choose(enough, below, above)
        high = torch.where(enough, high, 2 * high)
        above, enough = at(high)
    reached = enough
    for _ in range(bisections):
        middle = (low + high) / 2
        candidate, enough = at(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        below, above = _choose(enough, below, candidate), _choose(enough, candidate, above)
    mixture = _mixture(M, below, above, wanted)
    # Near τ = 1 an approximate polar may miss the constraint for every λ. Then polar(M) is used.
    return mixture if bool(reached.all()) else _choose(reached, mixture, polar(M, method))


def _mixture(M: Tensor, below: Tensor, above: Tensor, wanted: Tensor) -> Tensor:
    """Both sides are maximisers at λ, so every mixture is. This one meets the constraint."""
    lacking, excess = wanted - _inner(M, below), _inner(M, above) - wanted
    share = lacking / (lacking + excess).clamp_min(torch.finfo(M.dtype).tiny)
    return below + share.clamp(0, 1)[..., None, None] * (above - below)


def _doublings(dtype: torch.dtype) -> int:
    """After this many doublings Z is below the roundoff of λM; with a margin."""
    return 8 - math.frexp(torch.finfo(dtype).eps)[1]


def _choose(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition[..., None, None], yes, no)


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum(dim=(-2, -1))


def halfspace(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(P_B X P_A + λX), the smallest λ ≥ 0 with ⟨X, D⟩ ≥ τ‖X‖_*."""
    left, right = stack.map("left_map"), stack.map("right_map")
    return halfspace_direction(X, left, right, tau=group["tau"], polar_method=group["polar"])


def _step_work(x: Matrices, group: Group) -> Work:
    """One polar factor, and ‖X‖_* if τ > 0.

    This is the usual step on the CPU, in which no matrix violates the constraint. For one that
    does, λ is found by bisection, which takes more than 30 further polar factors of it. On
    accelerators every matrix takes 17 further ones in every step.
    """
    nuclear: Work = [Decomposition(x.count, "svdvals", x.m, x.n)] if group["tau"] else []
    inside = maps_work(x, *x.captured) + plain_polar_work(x, group)
    return inside + nuclear + decay_work(x, group)


RECIPE = Recipe(
    "Halfspace",
    geometry=GEOMETRY,
    clock=Clock(statistics="refresh_every", maps="refresh_every"),
    source=lerp_momentum,
    direction=halfspace,
    scale=muon_scale,
    settings={
        **rate(0.08),
        **PAPER,
        **with_defaults(CURVATURE, alpha=0.5, refresh_every=1),
        "tau": Setting(0.0, DECAY),
    },
    formula="D = polar(B̄^−½ M̂ A^−½ + λM̂), the smallest λ ≥ 0 with ⟨M̂, D⟩ ≥ τ‖M̂‖_*",
    origin="our interpretation of the paper's map-back baseline",
    work=StepWork(_step_work, captured=FACTORS),
)


@register
class Halfspace(MatrixOptimizer):
    """The inside-only half-power score with a spectral half-space safeguard.

    D = polar(B̄^(−½) M̂ A^(−½) + λM̂) for the smallest λ ≥ 0 with ⟨M̂, D⟩ ≥ τ‖M̂‖_*. This is our
    interpretation of the "registered halfspace baseline" of the paper's map-back study, which it
    does not define.
    """

    recipe = RECIPE
