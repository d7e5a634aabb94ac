"""Checks of input that may be wrong: numbers, JSON and paths that a user or a file gives."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError

DEEPEST = 50  # levels of nesting; the lab's own files have fewer than ten
LARGEST_JSON = 100_000_000  # bytes; the lab's own files have a few thousand
# What a value of a wrong kind or size can bring about where it is used.
BAD_VALUE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def parse_json(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, or it is nested so deep that using it would end the interpreter.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    level, depth = [value], 0
    while level := [part for item in level for part in _parts(item)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
    return value


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


@contextlib.contextmanager
def errors_naming(place: Path) -> Iterator[None]:
    """Let values of a wrong kind end in one line that names where they are from.

    Readers name the file and the field of what they check. This is for the rest: a report, a page
    or a table that is made from many fields of many files.
    """
    try:
        yield
    except BAD_VALUE_ERRORS as error:
        raise LabError(
            f"{place} holds values that do not fit together ({type(error).__name__}: {error}); "
            "put the files back as gomuon wrote them; if nobody changed them, please report this"
        ) from error


def is_file(path: Path) -> bool:
    """As Path.is_file, and False for a name that no file can have: one that is too long, say."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """As Path.is_dir, and False for a name that no folder can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


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
