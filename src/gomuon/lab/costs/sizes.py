"""Sizes of memory that a user writes, such as 80GB or 79.5GiB."""

from __future__ import annotations

import math
import re

from gomuon.lab.errors import LabError

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([A-Za-z]+)")
_BY_NAME = {name.lower(): size for name, size in UNITS.items()}
LARGEST = 2**60


def parse_bytes(flag: str, text: str) -> int:
    """Whole bytes, rounded down. Upper and lower case do not differ.

    Raises:
        LabError: the text is not a number and a unit, or the size is absurd.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _BY_NAME.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise LabError(
            f"{flag} {text!r} is not a size; write a number and a unit ({', '.join(UNITS)}), such "
            "as 80GB or 79.5GiB"
        )
    size = math.floor(min(float(match[1]), float(LARGEST)) * unit)
    if size > LARGEST:
        raise LabError(f"{flag} {text!r} is more than {LARGEST // UNITS['TiB']:,} TiB; check it")
    return size
