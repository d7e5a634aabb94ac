"""Every arm by name, and the choice among them."""

from __future__ import annotations

from gomuon.lab.bench.arms import OWN, REFERENCE, Arm
from gomuon.lab.bench.other_packages import rivals
from gomuon.lab.errors import LabError, unknown_name


def registry(compiled: bool = False) -> dict[str, Arm]:
    """Every arm by name; `compiled` leaves heavyball its own way to compile."""
    return {arm.name: arm for arm in (*OWN, *rivals(compiled))}


def choose(words: str, compiled: bool = False) -> list[Arm]:
    """The arms of a comma-separated list, all of them for an empty one; the reference always.

    Raises:
        LabError: a name is unknown or given twice.
    """
    known = registry(compiled)
    names = [word.strip() for word in words.split(",")] if words.strip() else list(known)
    for name in names:
        if name not in known:
            raise unknown_name("arm", name, known)
        if names.count(name) > 1:
            raise LabError(f"--arms names {name!r} twice; name each once")
    return [arm for name, arm in known.items() if name in names or name == REFERENCE]
