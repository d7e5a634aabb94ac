"""The steps of the walk gradient → source → direction → scale, as functions of stacks [b, m, n]."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gomuon.functional import frobenius_graft, halfspace_direction, matched_direction

Group = Mapping[str, Any]


def lerp_momentum(G: Tensor, M: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """M_t = βM_{t−1} + (1−β)G_t and the source, (1−β)G_t + βM_t with Nesterov."""
    beta = group["momentum"]
    M = beta * M + (1 - beta) * G
    return M, (1 - beta) * G + beta * M if group["nesterov"] else M


def matched_polar(M: Tensor, left: Tensor | None, right: Tensor | None, group: Group) -> Tensor:
    """D_0 = P_B·polar(P_B M P_A)·P_A."""
    return matched_direction(M, left, right, polar_method=group["polar"])


def halfspace(M: Tensor, left: Tensor | None, right: Tensor | None, group: Group) -> Tensor:
    """polar(P_B M P_A + λM), the smallest λ ≥ 0 with ⟨M, D⟩ ≥ τ‖M‖_*."""
    return halfspace_direction(M, left, right, tau=group["tau"], polar_method=group["polar"])


def muon_scale(D: Tensor, group: Group) -> Tensor:
    """Graft to ‖D‖_F = √min(m, n) if asked for, then √max(1, m/n)."""
    m, n = D.shape[-2:]
    grafted = frobenius_graft(D) if group["graft"] == "frobenius" else D
    return math.sqrt(max(1, m / n)) * grafted
