"""The exceptions that the command line turns into a message and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """A user's error; its message is the single line the user reads. Exit code 2."""


class Interrupted(Exception):
    """The user pressed Ctrl-C; the message, if any, says what is kept. Exit code 130."""


class Crashed(Exception):
    """A run failed because of a bug; the message has its traceback. Exit code 1."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> LabError:
    """The error for an unknown name: it suggests the nearest known name, or lists all of them."""
    names = sorted(known)
    lower = {known.lower(): known for known in names}
    nearest = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[nearest[0]]!r}?" if nearest else f"known: {', '.join(names)}"
    return LabError(f"unknown {kind} {name!r}; {hint}")
