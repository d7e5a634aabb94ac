"""How large a number may be: beyond that nothing is computed, or nobody would wait for it."""

from __future__ import annotations

import sys
from typing import Any

from gomuon.lab.errors import LabError

# The most a whole number may be, by the name of its flag or field.
MOST = {
    "steps": 10_000_000,
    "jobs": 1_024,
    "threads": 1_024,
    "width": 16_384,
    "layers": 1_000,
    "heads": 1_000,
    "hidden": 65_536,
    "length": 65_536,
    "batch": 65_536,
    "modulus": 1_000,  # a batch holds half of all pairs, each with a logit for every number: p³/2
    "evaluate_every": 10_000_000,
    "checkpoint_every": 10_000_000,
    "grid": 10_000,
    "cycles": 10_000,
    "ranks": 1_000_000,
    "shards": 1_000_000,
    "refresh-every": 1_000_000_000,
    "token-stride": 1_000_000_000,
    "tokens": 1_000_000_000_000,
}


def require_whole(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no whole number from `least` to `most`, by default the name's own.

    Raises:
        LabError: it is not; `name` may be written as a flag, with dashes before it.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise LabError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise LabError(f"{name} must be at least {least}, not {value}")
    limit = MOST[name.removeprefix("--")] if most is None else most
    if value > limit:
        raise LabError(f"{name} must be at most {limit:,}, not {value}")


def require_positive(name: str, value: Any) -> None:
    """Refuse what is no positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LabError(f"{name} must be a number, not {value!r}")
    if not 0 < value <= sys.float_info.max:  # not so for NaN
        raise LabError(f"{name} must be a positive number, not {value}")
