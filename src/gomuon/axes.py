"""The stations of the walk gradient → source → direction → trust → scale, and decay.

Each is a function of a `Stack` (G, W, memories and maps of layers of one shape, [b, m, n]) and its
group's settings. A method is a choice of one for each station; see `recipes`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    halfspace_direction,
    inside_only_direction,
    polar,
)
from gomuon.functional.oracle import matched_direction_and_rank, preconditioned, rank_of
from gomuon.stacks import Stack

Group = Mapping[str, Any]
Source = Callable[[Stack, Group], Tensor]
Direction = Callable[[Tensor, Stack, Group], Tensor]
Pending = tuple[Stack, Tensor, Tensor]  # a stack, its source, its direction
Decay = Callable[[Stack, Group], tuple[float | Tensor, Tensor | None]]
Total = Callable[[Tensor], Tensor]  # over all ranks
Trust = Callable[[Iterable[Pending], Group, Total], Iterable[Pending]]
Scale = Callable[[Tensor, Stack, Group], Tensor]


# ---- sources: G -> X --------------------------------------------------------------------------


def gradient(stack: Stack, group: Group) -> Tensor:
    """X = G."""
    return stack.G


def lerp_momentum(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)G; X = (1−β)G + βM with Nesterov, else M."""
    return _lerp(stack.G, stack, group)


def heavy_ball(stack: Stack, group: Group) -> Tensor:
    """M ← βM + G; X = G + βM with Nesterov, else M."""
    return _heavy_ball(stack.G, stack, group)


def momentum_of_right_preconditioned(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)·G P_A: the geometry enters before the average."""
    G = preconditioned(stack.G, None, stack.map("right_map"))
    return _lerp(stack.usable(G, 0.0), stack, group)


def whitened_momentum(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)·P_B G P_A: momentum in whitened coordinates."""
    G = preconditioned(stack.G, stack.map("left_map"), stack.map("right_map"))
    return _lerp(stack.usable(G, 0.0), stack, group)


def adam_mean(stack: Stack, group: Group) -> Tensor:
    """M ← β₁M + (1−β₁)G, kept in the original coordinates."""
    return stack.memory("momentum").lerp_(stack.G, 1 - group["betas"][0])


def _lerp(G: Tensor, stack: Stack, group: Group) -> Tensor:
    beta = group["momentum"]
    M = stack.memory("momentum").lerp_(G, 1 - beta)
    return G.lerp(M, beta) if group["nesterov"] else M


def _heavy_ball(G: Tensor, stack: Stack, group: Group) -> Tensor:
    beta = group["momentum"]
    M = stack.memory("momentum").mul_(beta).add_(G)
    return G.add(M, alpha=beta) if group["nesterov"] else M


# ---- directions: X -> D ---------------------------------------------------------------------


def matched_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(P_B X P_A)·P_A, grafted if the group says so."""
    left, right = stack.map("left_map"), stack.map("right_map")
    D, rank = matched_direction_and_rank(X, left, right, polar_method=group["polar"])
    return _grafted(D, rank, group)


def matched_polar_own_length(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """Q = polar(P_B X P_A); D = P_B Q P_A rescaled to ‖Q‖_F."""
    left, right = stack.map("left_map"), stack.map("right_map")
    Q = inside_only_direction(X, left, right, polar_method=group["polar"])
    return _to_length(preconditioned(Q, left, right), _length(Q))


def matched_polar_diagonal(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(P_B X P_A)·P_A with diagonal maps, grafted if the group says so."""
    left, right = stack.map("left_scale"), stack.map("right_scale")
    both = torch.ones_like(X) if left is None or right is None else left * right
    Q = polar(both * X, group["polar"])
    return _grafted(both * Q, rank_of(Q), group)


def mapped_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(X)·P_A, X being in whitened coordinates already."""
    left, right = stack.map("left_map"), stack.map("right_map")
    return preconditioned(polar(X, group["polar"]), left, right)


def plain_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X)."""
    return polar(X, group["polar"])


def squared_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X/(√v + 1e-10)), v the average of X²."""
    v = stack.memory("square")
    stack.remember(v, v.lerp(X.square(), 1 - group["square_decay"]))
    return polar(X / (v.sqrt() + 1e-10), group["polar"])


def equilibrated_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(diag(r)^(−½) X [diag(c)^(−½)]), r and c squared norms of X's rows and columns."""
    Z = X * (X.square().sum(-1, keepdim=True) + 1e-8).rsqrt()
    if group["equilibrate"] == "row_col":
        Z = Z * (X.square().sum(-2, keepdim=True) + 1e-8).rsqrt()
    return polar(Z, group["polar"])


def normalised_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X), then columns and/or rows divided by √(Σu² + 1e-7)."""
    D = polar(X, group["polar"])
    for side in group["normalise"].split("_"):
        D = D * (D.square().sum(-1 if side == "row" else -2, keepdim=True) + 1e-7).rsqrt()
    return D


def polar_or_sign(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """The LMO of the group's norm: the polar factor, or sign(X)/n for an output head."""
    return X.sign() / X.shape[-1] if group["norm"] == "sign" else polar(X, group["polar"])


def halfspace(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(P_B X P_A + λX), the smallest λ ≥ 0 with ⟨X, D⟩ ≥ τ‖X‖_*."""
    left, right = stack.map("left_map"), stack.map("right_map")
    return halfspace_direction(X, left, right, tau=group["tau"], polar_method=group["polar"])


def natural_gradient(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = V_B[(V_Bᵀ X V_A)/(λ_B λ_Aᵀ + damping)]V_Aᵀ."""
    V_B, V_A = stack.map("left_basis"), stack.map("right_basis")
    values_B, values_A = stack.map("left_values"), stack.map("right_values")
    if V_B is None or V_A is None or values_B is None or values_A is None:
        return X  # nothing captured: the identity, as for every geometry
    rotated = V_B.mT @ X @ V_A
    damped = values_B.unsqueeze(-1) * values_A.unsqueeze(-2) + group["damping"]
    return V_B @ (rotated / damped) @ V_A.mT


def grafted_preconditioning(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_L X P_R rescaled to the length of another rule's step."""
    D = preconditioned(X, stack.map("left_map"), stack.map("right_map"))
    rule = group["graft"]
    if rule is None:
        return D
    if rule == "sgd":
        return _to_length(D, _length(X))
    kept, weight = (1.0, 1.0) if rule == "adagrad" else (0.999, 0.001)
    square = stack.memory("square")
    stack.remember(square, square.mul(kept).addcmul_(X, X, value=weight))
    return _to_length(D, _length(X / (square.sqrt() + 1e-10)))


def rotated_adam(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L[(Q_LᵀMQ_R)/(√v + ε)]Q_Rᵀ, bias-corrected; v the average of (Q_LᵀGQ_R)²."""
    (beta1, beta2), s = group["betas"], stack.updates
    left, right = stack.map("left_basis"), stack.map("right_basis")
    transposed = (None if left is None else left.mT, None if right is None else right.mT)

    def rotate(Y: Tensor) -> Tensor:
        return preconditioned(Y, transposed[0], right)

    v = stack.memory("square")
    stack.remember(v, v.lerp(rotate(stack.G).square(), 1 - beta2))
    step = rotate(X) / (v.sqrt() + group["eps"])
    correction = math.sqrt(1 - beta2**s) / (1 - beta1**s)
    return correction * preconditioned(step, left, transposed[1])


def _grafted(D: Tensor, rank: Tensor, group: Group) -> Tensor:
    """‖D‖_F = √rank of the polar factor, √min(m, n) at full rank; None keeps the oracle's own."""
    return frobenius_graft(D, rank) if group.get("graft") == "frobenius" else D


def _length(X: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(X, keepdim=True)


def _to_length(D: Tensor, length: Tensor) -> Tensor:
    own = _length(D)
    return D * torch.where(own > 0, length / own, 0.0)


# ---- trust: all directions of a group together --------------------------------------------------


def each_alone(pending: Iterable[Pending], group: Group, total: Total) -> Iterable[Pending]:
    """Nothing couples the layers, and none waits for another."""
    return pending


def kl_clip(pending: Iterable[Pending], group: Group, total: Total) -> Iterator[Pending]:
    """D·min(1, √(clip/|Σ lr²⟨G, D⟩|)), the sum over every layer of the group."""
    waiting = list(pending)
    factor: Tensor | float = 1.0
    if group["kl_clip"] is not None:
        none = torch.zeros((), dtype=torch.float64, device="cpu")  # where this rank owns nothing
        products = sum(((stack.G * D).sum().double() for stack, _, D in waiting), none)
        change = (group["lr"] ** 2 * total(products)).abs()
        # A sum that overflows is a change beyond any budget: nothing moves.
        factor = (group["kl_clip"] / change).sqrt().nan_to_num(0.0, posinf=1.0).clamp(max=1.0)
    for stack, X, D in waiting:
        yield stack, X, factor * D


# ---- scales: D -> U ---------------------------------------------------------------------------


def muon_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√max(1, m/n)·D."""
    return _aspect(D) * D


def scaled_muon(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """c·√max(1, m/n)·D."""
    return group["scale"] * _aspect(D) * D


def ratio_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√(m/n)·D, or √max(1, m/n)·D with aspect "max"."""
    return _aspect(D, clipped=group["aspect"] == "max") * D


def rms_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """.2√max(m, n)·D: AdamW's root mean square."""
    return 0.2 * math.sqrt(max(D.shape[-2:])) * D


def radius_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """The radius of the norm ball, times √(m/n) where the norm is spectral."""
    return group["radius"] * (1.0 if group["norm"] == "sign" else _aspect(D, clipped=False)) * D


def momentum_after(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """Heavy ball over directions rather than gradients."""
    return _heavy_ball(D, stack, group)


def shrunk_with_weights(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """(1 − lr·λ)·D: weight decay applied after the update shortens the update too."""
    return (1 - group["lr"] * group["weight_decay"]) * D


def _aspect(D: Tensor, *, clipped: bool = True) -> float:
    m, n = D.shape[-2:]
    return math.sqrt(max(1.0, m / n) if clipped else m / n)


# ---- decay: (factor, drift) in W ← factor·W − drift − lr·U --------------------------------------


def decayed(stack: Stack, group: Group) -> tuple[float | Tensor, Tensor | None]:
    """W ← (1 − lr·λ)W, or in the step's geometry W ← W − lr·λ·W P_A²/mean(P_A²)."""
    rate = group["lr"] * group["weight_decay"]
    right = stack.map("right_map") if group.get("geometry_decay") else None
    if right is None:
        return 1 - rate, None
    metric = right @ right
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return 1.0, rate * stack.W @ (metric / mean)


def constrained_or_decayed(stack: Stack, group: Group) -> tuple[float | Tensor, Tensor | None]:
    """W ← (1 − lr)W, which keeps W in the norm ball, or plain decay."""
    return 1 - group["lr"] * (1.0 if group["constrained"] else group["weight_decay"]), None
