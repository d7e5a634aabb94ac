"""SINGD: K-FAC without inverses, in dense, block-diagonal or diagonal form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import diagonal_of
from gomuon.functional.linalg import finite_factors, identity_like, is_diagonal
from gomuon.functional.oracle import preconditioned
from gomuon.geometry.base import Geometry
from gomuon.geometry.moments_to_maps import (
    UNUSABLE,
    USABLE,
    SideName,
    moment_of,
    not_none,
    observed_side,
    of_strips,
)
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer, side_of
from gomuon.parameters.stacks import Stack, group_by_key
from gomuon.parameters.state import Entries, both_sides
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import CAPTURE, MOMENTUM, Clock, Group, gradient, momentum_after, rate
from gomuon.recipes.work import (
    CapturedFactors,
    Factors,
    Matrices,
    Product,
    StepWork,
    Work,
    maps_work,
)
from gomuon.settings import (
    DECAY,
    FLAG,
    INTERVAL,
    NOT_NEGATIVE,
    Setting,
    with_defaults,
)

SIDES: tuple[SideName, SideName] = ("left", "right")


class InverseFree(Geometry):
    """C and K with CCᵀ ≈ (B + λI)⁻¹ and KKᵀ ≈ (A + λI)⁻¹, found by descent and not by inverses.

    One step for every observation of A = E[xxᵀ] and B = E[δδᵀ]. Both sides need each other, so
    layers that share an input have each a K of their own. Factors in other forms than whole
    matrices (`block_size`, `long_sides`, a LayerSpec) have C and K in the same form.
    """

    description = "roots of inverse activation/backward moments"
    uses_moments: ClassVar[bool] = True
    entries: ClassVar[Entries] = {
        # Wide: each step adds to them, and steps are smaller than bfloat16's rounding errors.
        **both_sides("map", cut=True, wide=True),
        **both_sides("velocity", cut=True, wide=True),
    }

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        return True, True

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        seen = {side: _seen(side, due, group) for side in SIDES}
        ready = [layer for layer in due if _is_ready(layer, seen)]
        flags: list[Tensor] = []
        observed: list[Layer] = []
        for alike in group_by_key(ready, lambda l: (l.shape, l.forms, l.dtype, l.parameter.device)):
            flags.append(_take_step(alike, seen, group))
            observed += alike
        if not flags:
            return ()
        device = flags[0].device
        failed = torch.cat([flag.to(device) for flag in flags]).tolist()  # waits, once
        return [layer for layer, has_failed in zip(observed, failed, strict=True) if has_failed]


@dataclass(frozen=True)
class _Seen:
    """What was observed of one side of a layer: S of each block, and what became of each."""

    S: Tensor
    outcomes: Tensor
    has_rows: Tensor


def _seen(side: SideName, due: Sequence[Layer], group: Group) -> dict[Layer, _Seen]:
    found: dict[Layer, _Seen] = {}
    for new in observed_side(side, due, group, shrunk=False):
        for same, S, outcome in zip(new.layers, new.S, new.outcomes, strict=True):
            for layer in same:
                count = not_none(moment_of(layer, side)).count
                rows = of_strips(_flags_on(S.device, count.reshape(-1) > 0), len(S))
                each = not_none(layer.per_block(S, side))
                has_rows = not_none(layer.per_block(rows, side))
                found[layer] = _Seen(each, outcome.expand(len(each)), has_rows)
    return found


def _flags_on(device: torch.device, flags: Tensor) -> Tensor:
    """Flags on this device. Those of the host are written there, because a copy would wait."""
    if flags.device == device:
        return flags
    return torch.cat([torch.full((1,), flag, device=device) for flag in flags.tolist()])


def _is_ready(layer: Layer, seen: Mapping[SideName, Mapping[Layer, _Seen]]) -> bool:
    """Whether everything was observed that is to be, and something was."""
    wanted = _factored(layer)
    return bool(wanted) and all(layer in seen[side] for side in wanted)


def _factored(layer: Layer) -> list[SideName]:
    """The sides that have a factor."""
    return [side for side, form in zip(SIDES, layer.forms, strict=True) if form.kind != "identity"]


def _take_step(
    layers: Sequence[Layer], seen: Mapping[SideName, Mapping[Layer, _Seen]], group: Group
) -> Tensor:
    """One descent step of the roots of layers of one shape; whether it failed, [layers]."""
    sides = _factored(layers[0])
    S = {side: torch.cat([seen[side][layer].S for layer in layers]) for side in sides}
    identities = {side: identity_like(S[side]).expand_as(S[side]) for side in sides}
    old = {side: _stacked(layers, f"{side}_map", identities[side]) for side in sides}
    velocity = {
        side: _stacked(layers, f"{side}_velocity", torch.zeros_like(S[side])) for side in sides
    }
    lengths = dict(zip(SIDES, layers[0].shape, strict=True))
    new = _descended(S, old, velocity, lengths, group)
    outcomes = torch.stack(
        [torch.cat([seen[side][layer].outcomes for layer in layers]) for side in sides]
    )
    rows = torch.stack(
        [torch.cat([seen[side][layer].has_rows for layer in layers]) for side in sides]
    )
    finite = torch.stack([finite_factors(P) & finite_factors(v) for P, v in new.values()])
    taken = ((outcomes == USABLE) & rows & finite).all(0)
    for side, (P, v) in new.items():
        mask = taken.view(-1, *[1] * (P.ndim - 1))
        kept = torch.where(mask, P, old[side]), torch.where(mask, v, velocity[side])
        blocks = [layer.blocks for layer in layers]
        for layer, root, speed in zip(layers, *(x.split(blocks) for x in kept), strict=True):
            layer.set_map(f"{side}_map", root.contiguous())
            layer.set_map(f"{side}_velocity", speed.contiguous())
    failed = ((outcomes == UNUSABLE) | ((outcomes == USABLE) & rows & ~finite)).any(0)
    return torch.stack([part.any() for part in failed.split([layer.blocks for layer in layers])])


def _stacked(layers: Sequence[Layer], name: str, starts: Tensor) -> Tensor:
    """An entry of all layers, [b, …]; its part of `starts` for a layer that has none."""
    kept = [layer.map_per_block(name, side_of(name)) for layer in layers]
    parts = starts.split([layer.blocks for layer in layers])
    return torch.cat([part if one is None else one for one, part in zip(kept, parts, strict=True)])


def _descended(
    S: Mapping[SideName, Tensor],
    roots: Mapping[SideName, Tensor],
    velocities: Mapping[SideName, Tensor],
    lengths: Mapping[SideName, int],
    group: Group,
) -> dict[SideName, tuple[Tensor, Tensor]]:
    """New roots and velocities, by side.

    With H = KᵀAK, mean eigenvalues tr̄, and the other side's H_C and C::

        m ← α·m + ½(tr̄(H_C)·H + λ·tr̄(CᵀC)·KᵀK − I)
        K ← K − β·K m
    """
    like_kfac, normalised = group["like_kfac"], group["normalise"]
    alpha = 0.0 if like_kfac else group["root_momentum"]
    H = {side: _times(_transposed(P), _times(S[side], P)) for side, P in roots.items()}
    squares = {side: _times(_transposed(P), P) for side, P in roots.items()}
    found: dict[SideName, tuple[Tensor, Tensor]] = {}
    for side, P in roots.items():
        other: SideName = "right" if side == "left" else "left"
        # A side without a factor is the identity, of mean eigenvalue one.
        coupled = other in roots and not like_kfac
        trace_H = _mean_eigenvalue(H[other], lengths[other], P) if coupled else 1.0
        trace_C = _mean_eigenvalue(squares[other], lengths[other], P) if coupled else 1.0
        pull = trace_H * H[side] + group["damping"] * trace_C * squares[side] - identity_like(P)
        pull = pull * (0.5 * (1 - alpha) if normalised else 0.5)
        velocity = pull + alpha * velocities[side]
        step: float | Tensor = group["root_rate"]
        if normalised:
            largest = velocity.abs().flatten(1).amax(1).clamp_min(1.0)
            step = step / largest.view(-1, *[1] * (P.ndim - 1))
        found[side] = P - step * _times(P, velocity), velocity
    return found


def _times(P: Tensor, Q: Tensor) -> Tensor:
    """The product of two square matrices of one form."""
    return P * Q if is_diagonal(P) else P @ Q


def _transposed(P: Tensor) -> Tensor:
    return P if is_diagonal(P) else P.mT


def _mean_eigenvalue(S: Tensor, d: int, like: Tensor) -> Tensor:
    """tr(S)/d of a side of length d, [b, 1, …] to be multiplied with `like`."""
    return diagonal_of(S, d).mean(-1).view(-1, *[1] * (like.ndim - 1))


def natural_gradient(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = CCᵀ X KKᵀ."""
    C, K = stack.map("left_map"), stack.map("right_map")
    inner = preconditioned(X, None if C is None else _transposed(C), K)
    return preconditioned(inner, C, None if K is None else _transposed(K))


def _step_work(x: Matrices, group: Group) -> Work:
    """Cᵀ X K, and C and Kᵀ around it."""
    return 2 * maps_work(x, *x.captured)


def _root_work(x: Factors, group: Group) -> Work:
    """AK, Kᵀ(AK), KᵀK, and K m."""
    return [Product(4 * x.count, x.d, x.d, x.d)]


RECIPE = Recipe(
    "SINGD",
    geometry=InverseFree(),
    clock=Clock(statistics="refresh_every", maps="refresh_every"),
    source=gradient,
    direction=natural_gradient,
    scale=momentum_after,
    settings={
        **rate(1e-3),
        **with_defaults(MOMENTUM, momentum=0.9, nesterov=False),
        "damping": Setting(1e-3, NOT_NEGATIVE),
        "root_rate": Setting(0.01, NOT_NEGATIVE),
        "root_momentum": Setting(0.5, DECAY),
        "like_kfac": Setting(False, FLAG),
        "normalise": Setting(False, FLAG),
        "refresh_every": Setting(10, INTERVAL),
        **with_defaults(CAPTURE, block_size=None),
    },
    formula="D = CCᵀ G KKᵀ, then momentum;  K ← K(I − β·m), m the average of ½(KᵀAK·tr + … − I)",
    origin="Lin et al. 2024, f-dangel/singd",
    official=(
        OfficialCode(
            "f-dangel/singd, singd/optim/optimizer.py",
            commit="006a03547172b56c20573c09de7b8c93defc25ed",
            theirs='structures=("dense", "dense")',
        ),
        OfficialCode(
            "f-dangel/singd, singd/structures/diagonal.py",
            commit="051fb1a94673138459061b807f790097f6d6da9f",
            ours={"max_side": 1, "long_sides": "diagonal"},
            theirs='structures=("diagonal", "diagonal")',
        ),
        OfficialCode(
            "f-dangel/singd, singd/structures/blockdiagonal.py",
            commit="006a03547172b56c20573c09de7b8c93defc25ed",
            ours={"block_size": 30},
            theirs='structures=("block30diagonal", "block30diagonal")',
        ),
    ),
    departures=(
        "Weight decay is decoupled; there it is added to the direction before the momentum.",
        "A side that 30 does not divide is cut into equal blocks; there a rest is left over.",
        "Toeplitz and hierarchical structures are missing.",
    ),
    joins_bias=True,
    work=StepWork(
        _step_work,
        captured=CapturedFactors(_root_work, one_for="block", keeps_factors=False, copies=2),
    ),
)


@register
class SINGD(MatrixOptimizer):
    r"""SINGD: structured inverse-free natural gradient descent.

    K-FAC whose inverses are never taken: CCᵀ and KKᵀ stand for those of B and A, and follow them by
    a descent step every `refresh_every` steps (T in the paper)::

        H_K = KᵀAK, H_C = CᵀBC
        m_K ← α₁m_K + ½(tr(H_C)/m·H_K + λ·tr(CᵀC)/m·KᵀK − I);   K ← K − β₁K m_K
        m_C ← α₁m_C + ½(tr(H_K)/n·H_C + λ·tr(KᵀK)/n·CᵀC − I);   C ← C − β₁C m_C
        W   ← W − lr·momentum(CCᵀ G KKᵀ)

    with λ = `damping`, β₁ = `root_rate` (there `lr_cov`) and α₁ = `root_momentum` (`alpha1`).
    `like_kfac=True` leaves out the traces and α₁, and `normalise=True` divides β₁ by the largest
    entry of m if that is above one (`normalize_lr_cov`).

    Structures: whole by default, as there ("dense"). `block_size=30` is their "block30diagonal"
    where 30 divides a side; other sides are cut into equal blocks here, there into blocks of 30 and
    a rest. `max_side=1, long_sides="diagonal"` is their "diagonal". A LayerSpec's `inputs=` and
    `outputs=` choose for one side of one layer. Their Toeplitz and hierarchical forms are missing.

    `offload="maps"` keeps C, K and their velocities on the host. No factors are kept, so
    `offload=True` moves nothing.

    Weight decay is decoupled here; there it is added to D before the momentum. Biases of linear
    layers join their weights as a column.
    """

    recipe = RECIPE
