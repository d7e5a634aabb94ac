"""How often layers refresh: every K steps, or when a criterion says so.

Two criteria are there. `Adaptive` measures steps: an interval follows the efficiency of cached
maps. `Rotated` measures bases: one is renewed when it no longer fits its factor.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gomuon.errors import describe_value


class Turn(NamedTuple):
    """When a layer refreshes.

    Attributes:
        phase: a part in [0, 1) of the interval, by which it refreshes later.
        interval: its own interval, if its clock adapts; None: it has none yet.
    """

    phase: float = 0.0
    interval: int | None = None


TOGETHER = Turn()


@dataclass(frozen=True)
class Adaptive:
    """A refresh interval that each unit of layers finds for itself: `refresh_every=Adaptive(.9)`.

    A unit are layers that share an input, such as q, k and v. It begins with `least` steps. At
    every refresh the step that its cached maps give is compared with the step of its fresh maps,
    for the same source: the *efficiency* of the cached maps is the cosine of both steps. If it is
    at least `efficiency` for all layers of the unit, the interval doubles, otherwise it is halved.

    Args:
        efficiency: the target, in (0, 1].
        least: the shortest interval, in steps.
        most: the longest interval.

    Raises:
        ValueError: a value is out of range.
    """

    efficiency: float = 0.9
    least: int = 1
    most: int = 64

    def __post_init__(self) -> None:
        if not _is_share(self.efficiency):
            raise ValueError(
                "efficiency of Adaptive must be a number in (0, 1], got "
                f"{describe_value(self.efficiency)}"
            )
        for name in ("least", "most"):
            if not is_interval(value := getattr(self, name)):
                raise ValueError(
                    f"{name} of Adaptive must be a whole number >= 1, got {describe_value(value)}"
                )
        if self.least > self.most:
            raise ValueError(
                f"least of Adaptive must be at most its most, got least={self.least} and "
                f"most={self.most}"
            )

    def interval(self, kept: int | None) -> int:
        """The interval of a layer with this one in its state, which may be from other settings."""
        return min(max(kept or self.least, self.least), self.most)

    def after(self, kept: int | None, *, holds: bool) -> int:
        """The interval after a refresh, if the efficiency of the cached maps was high enough."""
        now = self.interval(kept)
        return self.interval(2 * now if holds else now // 2)

    def as_dict(self) -> dict[str, Any]:
        """Its values by name, as checkpoints save them."""
        return asdict(self)


@dataclass(frozen=True)
class Rotated:
    """Bases are renewed when they no longer fit: `refresh_every=Rotated(.01)`.

    For methods whose factors are made of gradients. Every `every` steps each cached eigenbasis Q is
    compared with its factor L of now: it is renewed if ‖B − diag B‖_F > threshold·‖B‖_F with
    B = QᵀLQ. This is the relative error of L in the cached basis (Eschenhagen et al. 2025,
    "Purifying Shampoo"). Each side of each matrix is decided alone, by its state alone: nothing
    else is saved, and ranks need not agree.

    Args:
        threshold: τ, in (0, 1).
        every: steps between two looks, each of which takes two products with every factor.

    Raises:
        ValueError: a value is out of range.
    """

    threshold: float = 0.01
    every: int = 1

    def __post_init__(self) -> None:
        if not _is_share(self.threshold) or self.threshold == 1:
            raise ValueError(
                "threshold of Rotated must be a number in (0, 1), got "
                f"{describe_value(self.threshold)}"
            )
        if not is_interval(self.every):
            raise ValueError(
                f"every of Rotated must be a whole number >= 1, got {describe_value(self.every)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Its values by name, as checkpoints save them."""
        return asdict(self)


Interval = int | Adaptive | Rotated


def is_interval(value: Any) -> bool:
    """Whether a value is a whole number of steps."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 1 <= value < 2**63  # a larger number overflows in products


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def steps_between(every: Interval, turn: Turn) -> int:
    """The interval of a layer with this turn; with Rotated, that of its looks."""
    if isinstance(every, Rotated):
        return every.every
    return every.interval(turn.interval) if isinstance(every, Adaptive) else every


def shortest(every: Interval | None) -> int | None:
    """The interval that costs are counted with: an adaptive one may only grow.

    With Rotated every look may renew.
    """
    if isinstance(every, Rotated):
        return every.every
    return every.least if isinstance(every, Adaptive) else every


def longest(every: Interval | None) -> int:
    """The steps within which everything is renewed, or looked at; None is every step."""
    if isinstance(every, Rotated):
        return every.every
    return every.most if isinstance(every, Adaptive) else every or 1


def number_of_turns(every: Interval, units: int) -> int:
    """Among how many turns this many units are divided if they refresh one after the other."""
    if isinstance(every, Adaptive):  # even at every interval that is a multiple of `least`
        return max(every.least, min(every.most, units))
    return longest(every)


_CRITERIA: tuple[type[Adaptive] | type[Rotated], ...] = (Adaptive, Rotated)


def from_plain(value: Any) -> Any:
    """An Adaptive or a Rotated that was saved as a dict; any other value unchanged."""
    for kind in _CRITERIA:
        if isinstance(value, Mapping) and set(value) == set(kind.__dataclass_fields__):
            try:
                return kind(**value)
            except (TypeError, ValueError):
                return value
    return value


def as_plain(value: Any) -> Any:
    """The form in which a setting is saved: plain numbers, which torch loads without our code."""
    return value.as_dict() if isinstance(value, _CRITERIA) else value
