"""Settings: allowed values, defaults, and checks.

Every setting of a method is declared once, with its default and kind, so every value is checked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from gomuon.errors import describe_value
from gomuon.functional.factors import RootMethod
from gomuon.functional.polar_factor import PolarMethod
from gomuon.intervals import Adaptive, Rotated, is_interval

AdamWSettings = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """The values that a setting may have.

    Attributes:
        allows: whether a value is allowed.
        expected: describes the allowed values in error messages.
    """

    allows: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True)
class Setting:
    """A setting's default and its kind."""

    default: Any
    kind: Kind


Settings = Mapping[str, Setting]


def with_defaults(settings: Settings, **defaults: Any) -> dict[str, Setting]:
    """The settings, with other defaults for some of them."""
    changed = {name: replace(settings[name], default=value) for name, value in defaults.items()}
    return {**settings, **changed}


# ---- kinds -----------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _within(low: float, high: float, *, include_high: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not _is_number(value):
            return False
        number = float(value)
        return low <= number < high or (include_high and number == high)

    return check


def _pair_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def both(value: Any) -> bool:
        return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(check, value))

    return both


def _one_of(*choices: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is choice or value == choice for choice in choices)


_at_least_zero = _within(0, math.inf)
_decay = _within(0, 1)
_exponent = _within(0, 0.5, include_high=True)
_share = _within(0, 1, include_high=True)
_positive = _within(5e-324, math.inf)


def _is_damping(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and list(value) == ["damping"]
        and _at_least_zero(value["damping"])
    )


def one_of(*choices: Any) -> Kind:
    """One of these values."""
    *others, last = [f'"{c}"' if isinstance(c, str) else str(c) for c in choices]
    return Kind(_one_of(*choices), f"{', '.join(others)} or {last}")


def optional(kind: Kind) -> Kind:
    """None, or a value of this kind."""
    return Kind(lambda value: value is None or kind.allows(value), f"None or {kind.expected}")


NOT_NEGATIVE = Kind(_at_least_zero, "a finite number >= 0")
POSITIVE = Kind(_positive, "a number > 0")
DECAY = Kind(_decay, "a number in [0, 1)")
SHARE = Kind(_share, "a number in [0, 1]")
POSITIVE_SHARE = Kind(lambda value: _share(value) and value > 0, "a number in (0, 1]")
EXPONENT = Kind(_exponent, "a number in [0, 0.5]")
EXPONENTS = Kind(
    lambda value: _exponent(value) or _pair_of(_exponent)(value),
    "a number in [0, 0.5], or a pair of them (left, right)",
)
BETAS = Kind(_pair_of(_decay), "a pair of numbers in [0, 1)")
INTERVAL = Kind(is_interval, "a whole number >= 1")
ADAPTIVE = Kind(
    lambda value: isinstance(value, Adaptive) or is_interval(value),
    "a whole number >= 1 or gomuon.Adaptive(…)",
)
ROTATED = Kind(
    lambda value: isinstance(value, Rotated) or is_interval(value),
    "a whole number >= 1 or gomuon.Rotated(…)",
)
ROWS = Kind(
    lambda value: value is None or value == "auto" or is_interval(value),
    '"auto", None or a whole number >= 1',
)
WHOLE = Kind(
    lambda value: is_interval(value) or (value == 0 and type(value) is int), "a whole number >= 0"
)
FLAG = Kind(lambda value: isinstance(value, bool), "True or False")
ROOT_METHOD = Kind(_one_of(*get_args(RootMethod)), f"one of {get_args(RootMethod)}")
CONDITION = Kind(lambda value: _at_least_zero(value) and value > 1, "a finite number > 1")
POLAR = Kind(_one_of(*get_args(PolarMethod)), f"one of {get_args(PolarMethod)}")
SHRINKAGE = Kind(
    lambda value: _is_damping(value) or value == "oas" or _share(value),
    '"oas", a fixed intensity in [0, 1], or {"damping": a number >= 0}',
)

# ---- settings of every method and AdamW ----------------------------------------------------------

# Settings of the constructor and of every group, in addition to the method's own.
COMMON: Settings = {
    "loss_reduction": Setting("mean", one_of("mean", "sum")),
    "nonfinite": Setting("raise", one_of("raise", "skip", "allow")),
    "work": Setting("auto", one_of("auto", "shared", "replicated", "alone")),
    "tensor_parallel": Setting("blocks", one_of("blocks", "exact")),
}
_GROUP_SETTINGS: Settings = {
    "base_lr": Setting(None, POSITIVE),
    "treatment": Setting("auto", one_of("matrix", "adamw", "auto")),
}
ADAMW_SETTINGS: Settings = {
    "lr": Setting(3e-3, NOT_NEGATIVE),
    "betas": Setting((0.9, 0.95), BETAS),
    "eps": Setting(1e-8, NOT_NEGATIVE),
    "weight_decay": Setting(0.0, NOT_NEGATIVE),
}
ADAMW_DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in ADAMW_SETTINGS.items()}


def checked_names(settings: Settings) -> set[str]:
    """The names `check_settings` checks for a method with these settings."""
    return {*COMMON, *_GROUP_SETTINGS, *settings}


def check_settings(values: Mapping[str, Any], settings: Settings, where: str = "") -> None:
    """Raise a ValueError that names the first value out of range and what was expected.

    Args:
        values: the values of a constructor or a group. Other keys are not checked.
        settings: the method's own settings.
        where: the beginning of the message.
    """
    known = {**_GROUP_SETTINGS, **COMMON, **settings}
    for name, value in values.items():
        if name == "adamw":
            _check_adamw(value)
        elif name in known and not _allows(known[name].kind, value):
            raise ValueError(
                f"{where}{name} must be {known[name].kind.expected}, got {describe_value(value)}"
            )


def _check_adamw(adamw: Any) -> None:
    if not isinstance(adamw, Mapping):
        raise ValueError(
            f"adamw must be a dict of {', '.join(ADAMW_SETTINGS)}, got {describe_value(adamw)}"
        )
    unknown = [name for name in adamw if name not in ADAMW_SETTINGS]
    if unknown:
        raise ValueError(f"adamw has {', '.join(ADAMW_SETTINGS)}, but no {unknown[0]!r}")
    check_settings(adamw, ADAMW_SETTINGS, where="adamw's ")


def _allows(kind: Kind, value: Any) -> bool:
    """Whether a kind allows a value. A value that cannot be compared is not allowed."""
    try:
        return kind.allows(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return False


def python_value(value: Any) -> Any:
    """A one-element tensor as a Python number, also inside pairs; other values unchanged."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(python_value, value))
    return value
