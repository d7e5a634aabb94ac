"""Flags that several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gomuon.lab.errors import LabError

# Options left open: their help says what then happens, which "default: None" would not.
NO_DEFAULT_SHOWN = tyro.conf.arg(help_behavior_hint="")
OptionalInt = Annotated[int | None, NO_DEFAULT_SHOWN]
OptionalFloat = Annotated[float | None, NO_DEFAULT_SHOWN]
OptionalPath = Annotated[Path | None, NO_DEFAULT_SHOWN]
Flag = Annotated[bool, NO_DEFAULT_SHOWN]
OptionalText = Annotated[str, NO_DEFAULT_SHOWN]


@dataclass(frozen=True)
class ModelShape:
    """The model and its data; what is left open is the task's own."""

    width: OptionalInt = None
    """Width of the transformer; 64 for grokking, else 128."""
    layers: OptionalInt = None
    """Number of its layers; 3."""
    heads: OptionalInt = None
    """Attention heads per layer; 4."""
    hidden: OptionalInt = None
    """Width of its SwiGLU; 192 for grokking, else 384."""
    modulus: OptionalInt = None
    """The p of modular addition; 59."""
    length: OptionalInt = None
    """Characters per window; 128."""
    batch: OptionalInt = None
    """Windows per update; 16."""

    def as_dict(self) -> dict[str, int | None]:
        return dataclasses.asdict(self)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse a value that says nothing: taken for one that was left out, it would mean all of them.

    An unset variable of a shell script is the usual reason.
    """
    for flag, word in zip(["", *arguments], arguments, strict=False):
        name, given, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if (given or not name) and not value.strip():
            about = name or (flag if flag.startswith("-") else "an argument")
            raise LabError(f"{about} is empty; give it a value, or leave it out")
