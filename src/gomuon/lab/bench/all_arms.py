"""All arms by name, and the selection of some of them."""

from __future__ import annotations

from gomuon.lab.bench.arms import OWN, REFERENCE, BenchArm
from gomuon.lab.bench.other_packages import package_arms
from gomuon.lab.errors import LabError, unknown_name


def arms_by_name(compiled: bool = False) -> dict[str, BenchArm]:
    """All arms by name; `compiled` lets heavyball compile its steps, as it does by default."""
    return {arm.name: arm for arm in (*OWN, *package_arms(compiled))}


def choose(words: str, compiled: bool = False) -> list[BenchArm]:
    """The arms of a comma-separated list, or all for an empty list; the reference is always in.

    Raises:
        LabError: a name is unknown or given twice.
    """
    known = arms_by_name(compiled)
    names = [word.strip() for word in words.split(",")] if words.strip() else list(known)
    for name in names:
        if name not in known:
            raise unknown_name("arm", name, known)
        if names.count(name) > 1:
            raise LabError(f"--arms names {name!r} twice; give each name once")
    return [arm for name, arm in known.items() if name in names or name == REFERENCE]
