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
# What Python raises when a value of a wrong type or size is used.
BAD_VALUE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def parse_json(text: str) -> Any:
    """Parse a JSON value.

    Raises:
        ValueError: it is not JSON, or nested so deeply that using it could crash Python.
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
    """Turn errors caused by wrong values into a LabError that names the file or folder.

    Readers of single files name the wrong field. This is for reports and tables, which use many
    fields of many files.
    """
    try:
        yield
    except BAD_VALUE_ERRORS as error:
        raise LabError(
            f"{place} has values that do not fit together ({type(error).__name__}: {error}); "
            "restore the files as gomuon wrote them; if nobody changed them, please report this"
        ) from error


def is_file(path: Path) -> bool:
    """As Path.is_file, but False for a name that no file can have, such as one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """As Path.is_dir, but False for a name that no folder can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


# The largest value of each integer, by the name of its flag or field.
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
    "modulus": 1_000,  # a batch has p²/2 pairs with p logits each
    "evaluate_every": 10_000_000,
    "checkpoint_every": 10_000_000,
    "grid": 10_000,
    "cycles": 10_000,
    "ranks": 1_000_000,
    "shards": 1_000_000,
    "tensor-parallel": 1_000_000,
    "refresh-every": 1_000_000_000,
    "rows": 1_000_000_000,
    "token-stride": 1_000_000_000,
    "tokens": 1_000_000_000_000,
}


def require_whole(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Require an integer from `least` to `most`, which defaults to MOST[name].

    `name` may be a flag with its dashes.

    Raises:
        LabError: the value is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise LabError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise LabError(f"{name} must be at least {least}, not {value}")
    limit = MOST[name.removeprefix("--")] if most is None else most
    if value > limit:
        raise LabError(f"{name} must be at most {limit:,}, not {value}")


def require_positive(name: str, value: Any) -> None:
    """Require a positive finite number, else raise a LabError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LabError(f"{name} must be a number, not {value!r}")
    if not 0 < value <= sys.float_info.max:  # False for NaN
        raise LabError(f"{name} must be a positive number, not {value}")
