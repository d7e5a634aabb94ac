"""The campaigns the page is about: the name of each folder, and what its plan must declare."""

from __future__ import annotations

from dataclasses import dataclass

from gomuon.lab.errors import unknown_name

TASKS = {"ptb": "Penn Treebank", "shakespeare": "Tiny Shakespeare", "grokking": "modular addition"}


@dataclass(frozen=True)
class Slot:
    """A place under ``results/``."""

    name: str
    experiment: str
    task: str


PAPER = ("ptb", "shakespeare", "grokking", "mapback", "lazy")
ON_PTB = ("mapback", "lazy")
CORPORA = ("ptb", "shakespeare")
EARLIER = "ptb-earlier"
SLOTS: dict[str, Slot] = {
    slot.name: slot
    for slot in (
        *(Slot(name, name, "ptb" if name in ON_PTB else name) for name in PAPER),
        *(Slot(f"tune-{task}", "tune", task) for task in TASKS),
        *(Slot(f"race-{task}", "race", task) for task in TASKS),
        Slot("ablations", "ablations", "ptb"),
        Slot("adamw-rate", "adamw-rate", "grokking"),
        *(Slot(f"muon-rate-{task}", f"muon-rate-{task}", task) for task in CORPORA),
        Slot("null-space", "null-space", "ptb"),
        Slot(EARLIER, "ptb", "ptb"),
    )
}


def find(name: str) -> Slot:
    """The slot of that name.

    Raises:
        LabError: the page has no place for it; the nearest is suggested.
    """
    if name not in SLOTS:
        raise unknown_name("campaign", name, SLOTS)
    return SLOTS[name]
