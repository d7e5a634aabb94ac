"""`--options` of race and tune: further keywords of the optimizers, for each of them."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from gomuon.lab.errors import LabError

OPENING, CLOSING = "([{", ")]}"
EXAMPLE = "write for example go-muon.refresh_every=8,torch.optim:Muon.nesterov=False"


def parse_options(text: str, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """``go-muon.alpha=(0,.25),muon.nesterov=False`` as keywords by optimizer."""
    found: dict[str, dict[str, Any]] = {}
    for part in _parts(text):
        left, given, value = (piece.strip() for piece in part.partition("="))
        name, _, key = left.rpartition(".")
        if not (given and name and key.isidentifier() and value):
            raise LabError(f"--options {part!r} is not understood; {EXAMPLE}")
        if name not in wanted:
            raise LabError(f"--options names {name!r}, which is not among {', '.join(wanted)}")
        if key == "lr":
            raise LabError(
                f"--options {part}: a rate is given with --lr, or --rates of gomuon tune"
            )
        of_name = found.setdefault(name, {})
        if key in of_name:
            raise LabError(f"--options has {left} twice: {text}; give one value for each")
        of_name[key] = _value(value, part)
    return found


def _parts(text: str) -> list[str]:
    """The text between commas that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for index, sign in enumerate(text):
        depth += (sign in OPENING) - (sign in CLOSING)
        if sign == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    parts = [part for part in (part.strip() for part in [*parts, text[begin:]]) if part]
    if text and not parts:
        raise LabError(f"--options {text!r} has no value; give it one, or leave it out")
    return parts


def _value(text: str, where: str) -> Any:
    """A number, True, False, None, or a list of these; anything else is a text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if re.search(r"[\[\](){}]", text):
            raise LabError(f"--options {where}: {text!r} is not understood; {EXAMPLE}") from None
        return text
    return _plain(value, where)


def _plain(value: Any, where: str) -> Any:
    """The value as it comes back from a file."""
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    if not isinstance(value, str | int | float | None) or value in (math.inf, -math.inf):
        raise LabError(
            f"--options {where}: {value!r} is not a finite number, a text, True, False, None or a "
            "list of these"
        )
    return value
