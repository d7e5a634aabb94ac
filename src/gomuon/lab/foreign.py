"""What others may have written: JSON that need not fit, and paths that need not be usable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError

DEEPEST = 50  # levels of nesting; the lab's own files have fewer than ten
LARGEST_JSON = 100_000_000  # bytes; the lab's own files have a few thousand
# What a value of a wrong kind or size can bring about where it is used.
UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


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
def making_sense_of(place: Path) -> Iterator[None]:
    """Let values of a wrong kind end in one line that names where they are from.

    Readers name the file and the field of what they check. This is for the rest: a report, a page
    or a table that is made from many fields of many files.
    """
    try:
        yield
    except UNFIT as error:
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
