"""The one exception a user of the lab is meant to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Its message is the single line a user reads; the command line turns it into exit code 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> LabError:
    """The error for a name nobody registered: it suggests the nearest one, or lists them all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names)}"
    return LabError(f"unknown {kind} {name!r}; {hint}")
