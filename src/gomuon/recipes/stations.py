"""The stations that several methods share: clock, source, direction, trust, scale, decay.

Each is a function of a `Stack` (G, W, memories and maps of layers of one shape, [b, m, n]) and the
settings of its group. A method chooses one function for each station. A function that only one
method uses is in the file of this method.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import diagonal_of, right_product, squared
from gomuon.functional.oracle import frobenius_graft, matched_direction
from gomuon.functional.polar_factor import polar
from gomuon.intervals import TOGETHER, Adaptive, Interval, Turn, steps_between
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.stacks import Participants, Stack
from gomuon.parameters.state import INTERVAL as OWN_INTERVAL
from gomuon.settings import (
    CONDITION,
    DECAY,
    EXPONENTS,
    FLAG,
    INTERVAL,
    NOT_NEGATIVE,
    POLAR,
    ROOT_METHOD,
    ROWS,
    SHRINKAGE,
    WHOLE,
    Setting,
    Settings,
    one_of,
    optional,
    with_defaults,
)

Group = Mapping[str, Any]
Source = Callable[[Stack, Group], Tensor]
Direction = Callable[[Tensor, Stack, Group], Tensor]
Pending = tuple[Stack, Tensor, Tensor]  # a stack, its source, its direction
Decay = Callable[[Stack, Group], tuple[float | Tensor, Tensor | None]]
Total = Callable[[Tensor], Tensor]  # a sum over all ranks
Trust = Callable[[Iterable[Pending], Group, Total], Iterable[Pending]]
Scale = Callable[[Tensor, Stack, Group], Tensor]


# ---- the clock: t mod K = 0 ----------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """When factors are observed and when maps are renewed.

    Attributes:
        statistics: the name of the setting with the interval of observations; None: every step. If
            this setting is None in a group, factors are observed when maps are renewed.
        maps: the name of the setting with the interval of renewals; None: every step.
        at: the name of the setting that says at which step of an interval: "first", or "last", so
            that nothing is observed or renewed before step K. None: at the first.
    """

    statistics: str | None = None
    maps: str | None = None
    at: str | None = None

    def observes(self, group: Group, turn: Turn = TOGETHER) -> bool:
        """Whether the step `group["step"]` observes the factors of layers with this turn."""
        every = None if self.statistics is None else group[self.statistics]
        if self.statistics is not None and every is None:
            return self.renews(group, turn)
        return every is None or _is_due(self._position(group), every, turn)

    def renews(self, group: Group, turn: Turn = TOGETHER) -> bool:
        """Whether the step `group["step"]` renews the maps of layers with this turn."""
        return self.maps is None or _is_due(self._position(group), group[self.maps], turn)

    def ahead(self, group: Group) -> int:
        """1 if refreshes come a step earlier than t mod K = 0, at the last step of each K."""
        return int(self.at is not None and group[self.at] == "last")

    def _position(self, group: Group) -> int:
        return int(group["step"]) + self.ahead(group)

    def adaptive(self, group: Group) -> Adaptive | None:
        """The interval between two renewals, if each unit of layers finds its own."""
        every = None if self.maps is None else group[self.maps]
        return every if isinstance(every, Adaptive) else None


EVERY_STEP = Clock()
_NOT_MEASURED = math.inf


def _is_due(position: int, every: Interval, turn: Turn) -> bool:
    """t mod K = ⌊phase·K⌋, the condition of Equation (27), with the layer's own K if it has one."""
    K = every if isinstance(every, int) else steps_between(every, turn)
    return position % K == int(turn.phase * K)


class NextIntervals:
    """What a refresh decides about the next one: intervals of units that adapt, on all ranks alike.

    Attributes:
        votes: for each unit that is due: 1 if the cached maps of all its layers were good enough, 0
            if not. Ranks take the least, because a unit may have several owners.
    """

    def __init__(self, clock: Clock, group: Group, present: Participants, layout: Layout) -> None:
        self.votes: dict[str, float] = {}
        self._own: dict[str, float] = {}  # of units that only this rank has
        self._units = layout.units
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._every = clock.adaptive(group)
        if self._every is None:
            return
        own = layout.own
        # Of all ranks, because hooks are opened on all of them.
        for one in (*present.matrices, *present.layers):
            parameter: Tensor = one.parameter
            if parameter not in self._units:
                continue
            self._states[parameter] = one.state
            turn = Turn(layout.phases.get(parameter, 0.0), one.state.get(OWN_INTERVAL))
            if clock.renews(group, turn):
                votes = self._own if parameter in own else self.votes
                votes[self._units[parameter]] = _NOT_MEASURED

    def count(self, layers: Sequence[Layer]) -> None:
        """Count what was measured of these layers."""
        for layer in layers:
            if layer.holds is not None:
                unit = self._units[layer.parameter]
                votes = self.votes if unit in self.votes else self._own
                votes[unit] = min(votes[unit], float(layer.holds))
                layer.holds = None

    def settle(self) -> None:
        """Write the intervals into the states. A unit that was not measured keeps its own."""
        if self._every is None:
            return
        votes = {**self.votes, **self._own}
        for parameter, state in self._states.items():
            vote, kept = votes.get(self._units[parameter], _NOT_MEASURED), state.get(OWN_INTERVAL)
            if vote == _NOT_MEASURED:
                state[OWN_INTERVAL] = self._every.interval(kept)
            else:
                state[OWN_INTERVAL] = self._every.after(kept, holds=bool(vote))


# ---- sources: G -> X --------------------------------------------------------------------------


def gradient(stack: Stack, group: Group) -> Tensor:
    """X = G."""
    return stack.G


def lerp_momentum(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)G, Equation (30); X = (1−β)G + βM with Nesterov, Equation (31), else M."""
    return lerp(stack.G, stack, group)


def heavy_ball_momentum(stack: Stack, group: Group) -> Tensor:
    """M ← βM + G; X = G + βM with Nesterov, else M."""
    return heavy_ball(stack.G, stack, group)


def lerp(G: Tensor, stack: Stack, group: Group) -> Tensor:
    """`lerp_momentum` of something other than the gradient."""
    beta = group["momentum"]
    M = stack.memory("momentum").lerp_(G, 1 - beta)  # (30)
    return G.lerp(M, beta) if group["nesterov"] else M  # (31)


def heavy_ball(G: Tensor, stack: Stack, group: Group) -> Tensor:
    """`heavy_ball_momentum` of something other than the gradient."""
    beta = group["momentum"]
    M = stack.memory("momentum").mul_(beta).add_(G)
    return G.add(M, alpha=beta) if group["nesterov"] else M


# ---- directions: X -> D ---------------------------------------------------------------------


def matched_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(P_B X P_A)·P_A, Equations (32) and (33), then `grafted`."""
    left, right = stack.map("left_map"), stack.map("right_map")
    D, rank = matched_direction(X, left, right, polar_method=group["polar"])
    return grafted(D, rank, group)


def plain_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X), Equation (1)."""
    return polar(X, group["polar"])


def grafted(D: Tensor, rank: Tensor, group: Group) -> Tensor:
    """‖D‖_F = √rank of the polar factor, at full rank √min(m, n) as in Equation (34).

    Without a graft D keeps its own length.
    """
    return frobenius_graft(D, rank) if group.get("graft") == "frobenius" else D


def length(X: Tensor) -> Tensor:
    """‖X‖_F, [b, 1, 1]."""
    return torch.linalg.matrix_norm(X, keepdim=True)


def to_length(D: Tensor, wanted: Tensor) -> Tensor:
    """D rescaled to this Frobenius norm; 0 stays 0."""
    own = length(D)
    return D * torch.where(own > 0, wanted / own, 0.0)


# ---- trust: all directions of a group together --------------------------------------------------


def each_alone(pending: Iterable[Pending], group: Group, total: Total) -> Iterable[Pending]:
    """The layers are independent; none waits for another."""
    return pending


# ---- scales: D -> U ---------------------------------------------------------------------------


def muon_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√max(1, m/n)·D, the factor of Equation (35)."""
    factor = aspect(D)
    return D if factor == 1 else factor * D


def ratio_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√(m/n)·D, or √max(1, m/n)·D with aspect "max"."""
    return aspect(D, clipped=group["aspect"] == "max") * D


def aspect_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√(m/n)·D, which for a polar factor is one in the operator norm between root mean squares."""
    return aspect(D, clipped=False) * D


def rms_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """.2√max(m, n)·D: with ‖D‖_F = √rank an RMS of .2√(rank/min(m, n)), at full rank AdamW's .2."""
    return ADAMW_RMS * math.sqrt(max(D.shape[-2:])) * D


def measured_rms_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """D with an RMS of .2, for directions whose length says nothing about their rank."""
    return to_length(D, torch.full_like(length(D), ADAMW_RMS * math.sqrt(math.prod(D.shape[-2:]))))


def momentum_after(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """Heavy-ball momentum of directions instead of gradients."""
    return heavy_ball(D, stack, group)


def aspect(D: Tensor, *, clipped: bool = True) -> float:
    """√max(1, m/n), or √(m/n)."""
    m, n = D.shape[-2:]
    return math.sqrt(max(1.0, m / n) if clipped else m / n)


# ---- decay: (factor, drift) in W ← factor·W − drift − lr·U --------------------------------------


def decayed(stack: Stack, group: Group) -> tuple[float | Tensor, Tensor | None]:
    """W ← (1 − lr·λ)W, or in the step's geometry W ← W − lr·λ·W P_A²/mean(P_A²)."""
    rate = group["lr"] * group["weight_decay"]
    right = stack.map("right_map") if group.get("geometry_decay") else None
    if right is None:
        return 1 - rate, None
    metric = squared(right)
    mean = diagonal_of(metric, stack.shape[1]).mean(-1).view(-1, *[1] * (metric.ndim - 1))
    return 1.0, right_product(rate * stack.W, metric / mean)


def cautious(
    factor: float | Tensor, drift: Tensor | None, U: Tensor, stack: Stack
) -> tuple[float, Tensor]:
    """The decay where it moves a weight the same way as the update U, and none elsewhere.

    Plain decay becomes W ← W − lr·λ·𝕀(U⊙W ≥ 0)⊙W (arXiv 2510.12402).
    """
    W = stack.W
    decay = (1 - factor) * W if drift is None else (1 - factor) * W + drift
    return 1.0, torch.where(U * decay >= 0, decay, 0.0)


# ---- settings that several methods share --------------------------------------------------------


def rate(default: float) -> dict[str, Setting]:
    """The learning rate."""
    return {"lr": Setting(default, NOT_NEGATIVE)}


# What Moonlight takes for the root mean square of AdamW's updates at rate 1 (arXiv 2502.16982).
ADAMW_RMS = 0.2
STATE: Settings = {"state_dtype": Setting(None, one_of("bfloat16", "int8", None))}
# How captured sums travel between ranks; None: as they are computed.
SUMS: Settings = {"sums_dtype": Setting(None, one_of("bfloat16", None))}
# Whether checkpoints leave out maps that loading can rebuild from their factors.
REBUILD: Settings = {"rebuild_maps": Setting(False, FLAG)}
OFFLOAD: Settings = {"offload": Setting(False, one_of(False, True, "maps"))}
MOMENTUM: Settings = {
    "momentum": Setting(0.95, DECAY),
    "nesterov": Setting(True, FLAG),
    "weight_decay": Setting(0.0, NOT_NEGATIVE),
    "cautious_decay": Setting(False, FLAG),
    **STATE,
}
MUON: Settings = {
    **MOMENTUM,
    "lr_scale": Setting(None, one_of("adamw", None)),
    "polar": Setting("auto", POLAR),
}
PAPER: Settings = with_defaults(MUON, momentum=0.8)
CAPTURE: Settings = {
    "rows": Setting(None, ROWS),
    "token_stride": Setting(1, INTERVAL),
    "token_skip": Setting(0, WHOLE),
    "reduce": Setting(False, FLAG),
    "stagger": Setting("auto", one_of("auto", True, False)),
    "block_size": Setting(1024, optional(INTERVAL)),
    "max_side": Setting(None, optional(INTERVAL)),
    "long_sides": Setting("identity", one_of("identity", "diagonal")),
    **OFFLOAD,
    **SUMS,
}
# At which step of an interval layers refresh, see `Clock.at`.
AT_FIRST: Settings = {"refresh_at": Setting("first", one_of("first", "last"))}
AT_LAST: Settings = with_defaults(AT_FIRST, refresh_at="last")
ROOTS: Settings = {"roots": Setting("auto", ROOT_METHOD)}
CURVATURE: Settings = {
    **CAPTURE,
    **ROOTS,
    "max_condition": Setting(None, optional(CONDITION)),
    "alpha": Setting(0.25, EXPONENTS),
    "refresh_every": Setting(4, INTERVAL),
    "factor_decay": Setting(0.97, DECAY),
    "input_decay": Setting(None, optional(DECAY)),
    "shrinkage": Setting("oas", SHRINKAGE),
    "geometry_decay": Setting(False, FLAG),
    **REBUILD,
}
