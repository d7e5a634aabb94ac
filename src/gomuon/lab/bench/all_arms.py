"""All arms by name, and the selection of some of them."""

from __future__ import annotations

from gomuon.lab.bench.arms import REFERENCE, BenchArm
from gomuon.lab.bench.other_packages import package_arms
from gomuon.lab.bench.own_arms import OWN
from gomuon.lab.errors import LabError, unknown_name

# The one model on which every arm is measured; the others have those that readers look for.
EVERY_ARM = "paper"
FEW = (REFERENCE, "newton-schulz", "muon-fast", "go-muon-4", "go-muon-4-fast", "go-muon-fast")
_METHODS = ("muon-exact", "go-muon-1", "go-muon-4-exact", "go-muon-16", "soap", "shampoo", "kfac")
_BASELINES = ("torch-muon", "plain-muon", "plain-go-muon-1", "plain-go-muon-4")
USUAL = (*FEW, "muon", *_METHODS, "mousse", "mousse-fast", *_BASELINES)
ENOUGH = {"overhead": (*FEW, "muon", "torch-muon"), "resnet": FEW, "mlp-2048": FEW}
# One matrix after another, or bfloat16 on processors that emulate it: many seconds per step at this
# size. The other models show what they cost.
_SLOW = ("torch-muon", "heavyball-muon", "pytorch-optimizer-muon", "plain-muon")
TOO_SLOW = {"wide": (*_SLOW, "plain-go-muon-1", "plain-go-muon-4", "muon-exact", "go-muon-4-exact")}


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


def arms_for(
    workload: str, words: str, *, full: bool, compiled: bool = False
) -> tuple[list[BenchArm], list[BenchArm]]:
    """The arms to measure on a workload, and those left out because they take too long there."""
    arms = choose(words, compiled)
    if words.strip():
        return arms, []
    if workload != EVERY_ARM:
        packages = {arm.name for arm in package_arms(compiled)}
        enough = ENOUGH.get(workload, {*USUAL, *packages})
        arms = [arm for arm in arms if arm.name in enough]
    slow = TOO_SLOW.get(workload, ()) if full else ()
    return [a for a in arms if a.name not in slow], [a for a in arms if a.name in slow]
