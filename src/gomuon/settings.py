"""Hyper-parameters: what each must be, as data, checked for the constructor and for every group."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from gomuon.functional.checks import shown
from gomuon.functional.polar import PolarMethod

AdamWSettings = Mapping[str, Any]
ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 3e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def sides(alpha: float | tuple[float, float]) -> tuple[float, float]:
    """α of the left (output, B) and of the right (input, A) side."""
    return (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


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


def _whole(low: int) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and low <= value < 2**63  # what is larger overflows when it is multiplied

    return check


_at_least_zero = _within(0, math.inf)
_decay = _within(0, 1)
_exponent = _within(0, 0.5, include_high=True)
_share = _within(0, 1, include_high=True)
_positive = _within(5e-324, math.inf)
_whole_number = _whole(1)


def _is_damping(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and list(value) == ["damping"]
        and _at_least_zero(value["damping"])
    )


Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
MAY_BE_ONE = (_share, "a number in [0, 1]")
ONE_POWER = (_exponent, "a number in [0, 0.5]")
STEP_LENGTH = (_one_of("sgd", "adagrad", "rmsprop", None), '"sgd", "adagrad", "rmsprop" or None')

# name -> (check, what the message says was expected)
CHECKS: Checks = {
    "lr": (_at_least_zero, "a finite number >= 0"),
    "momentum": (_decay, "a number in [0, 1)"),
    "alpha": (
        lambda value: _exponent(value) or _pair_of(_exponent)(value),
        "a number in [0, 0.5], or a pair of them (left, right)",
    ),
    "refresh_every": (_whole_number, "a whole number >= 1"),
    "factor_decay": (_decay, "a number in [0, 1)"),
    "shrinkage": (
        lambda value: _is_damping(value) or value == "oas" or _share(value),
        '"oas", a fixed intensity in [0, 1], or {"damping": a number >= 0}',
    ),
    "polar": (_one_of(*get_args(PolarMethod)), f"one of {get_args(PolarMethod)}"),
    "graft": (_one_of("frobenius", None), '"frobenius" or None'),
    "nesterov": (lambda value: isinstance(value, bool), "True or False"),
    "weight_decay": (_at_least_zero, "a finite number >= 0"),
    "loss_reduction": (_one_of("mean", "sum"), '"mean" or "sum"'),
    "nonfinite": (_one_of("raise", "skip", "allow"), '"raise", "skip" or "allow"'),
    "work": (_one_of("shared", "replicated", "alone"), '"shared", "replicated" or "alone"'),
    "treatment": (_one_of("matrix", "adamw", "auto"), '"matrix", "adamw" or "auto"'),
    "input_decay": (lambda value: value is None or _decay(value), "None or a number in [0, 1)"),
    "geometry_decay": (lambda value: isinstance(value, bool), "True or False"),
    "statistics_every": (_whole_number, "a whole number >= 1"),
    "token_stride": (_whole_number, "a whole number >= 1"),
    "token_skip": (_whole(0), "a whole number >= 0"),
    "stagger": (lambda value: isinstance(value, bool), "True or False"),
    "reduce": (lambda value: isinstance(value, bool), "True or False"),
    "damping": (_at_least_zero, "a finite number >= 0"),
    "kl_clip": (lambda value: value is None or _positive(value), "None or a number > 0"),
    "ridge": (_at_least_zero, "a finite number >= 0"),
    "power": (_within(0, 1, include_high=True), "a number in [0, 1]"),
    "block_size": (_whole_number, "a whole number >= 1"),
    "max_side": (_whole(0), "a whole number >= 0"),
    "epsilon": (_at_least_zero, "a finite number >= 0"),
    "aspect": (_one_of("ratio", "max"), '"ratio" or "max"'),
    "mu": (_at_least_zero, "a finite number >= 0"),
    "square_decay": (_decay, "a number in [0, 1)"),
    "normalise": (
        _one_of("col", "row", "col_row", "row_col"),
        '"col", "row", "col_row" or "row_col"',
    ),
    "equilibrate": (_one_of("row", "row_col"), '"row" or "row_col"'),
    "constrained": (lambda value: isinstance(value, bool), "True or False"),
    "radius": (_at_least_zero, "a finite number >= 0"),
    "head_radius": (_at_least_zero, "a finite number >= 0"),
    "heads": (lambda value: value is None or _whole_number(value), "None or a whole number >= 1"),
    "norm": (_one_of("spectral", "sign"), '"spectral" or "sign"'),
    "scale": (_at_least_zero, "a finite number >= 0"),
    "tau": (_decay, "a number in [0, 1)"),
    "partner_damping": (_positive, "a number > 0"),
    "betas": (_pair_of(_decay), "a pair of numbers in [0, 1)"),
    "eps": (_at_least_zero, "a finite number >= 0"),
}


def check_settings(settings: Mapping[str, Any], own: Checks | None = None, where: str = "") -> None:
    """Raise a ValueError that names the first value that is out of range, and what was expected."""
    checks = {**CHECKS, **(own or {})}
    for name, value in settings.items():
        if name == "adamw":
            _check_adamw(value)
        elif name in checks and not _holds(checks[name][0], value):
            raise ValueError(f"{where}{name} must be {checks[name][1]}, got {shown(value)}")


def _holds(check: Callable[[Any], bool], value: Any) -> bool:
    """Whether a value passes; one that cannot even be looked at does not."""
    try:
        return check(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return False


def _check_adamw(adamw: Any) -> None:
    if not isinstance(adamw, Mapping):
        raise ValueError(f"adamw must be a dict of {', '.join(ADAMW_DEFAULTS)}, got {shown(adamw)}")
    unknown = [name for name in adamw if name not in ADAMW_DEFAULTS]
    if unknown:
        raise ValueError(f"adamw takes {', '.join(ADAMW_DEFAULTS)}; it has no {unknown[0]!r}")
    check_settings(adamw, where="adamw's ")
