"""Flags that several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gomuon.lab.errors import LabError

# Hides "default: None" in the help: the text of such an option says what happens without it.
NO_DEFAULT_SHOWN = tyro.conf.arg(help_behavior_hint="")
OptionalInt = Annotated[int | None, NO_DEFAULT_SHOWN]
OptionalFloat = Annotated[float | None, NO_DEFAULT_SHOWN]
OptionalPath = Annotated[Path | None, NO_DEFAULT_SHOWN]
Flag = Annotated[bool, NO_DEFAULT_SHOWN]
OptionalText = Annotated[str, NO_DEFAULT_SHOWN]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model and its data; without them the task's own."""

    width: OptionalInt = None
    """Width of the transformer. Default: 64 for grokking, else 128."""
    layers: OptionalInt = None
    """Number of layers. Default: 3."""
    heads: OptionalInt = None
    """Attention heads per layer. Default: 4."""
    hidden: OptionalInt = None
    """Width of the SwiGLU layer. Default: 192 for grokking, else 384."""
    modulus: OptionalInt = None
    """The p of modular addition. Default: 59."""
    length: OptionalInt = None
    """Characters per sequence. Default: 128."""
    batch: OptionalInt = None
    """Sequences per update. Default: 16."""

    def as_dict(self) -> dict[str, int | None]:
        return dataclasses.asdict(self)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty value, which would count as absent and so mean "all" or the default.

    The usual cause is an unset variable in a shell script.
    """
    for flag, word in zip(["", *arguments], arguments, strict=False):
        name, given, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if (given or not name) and not value.strip():
            about = name or (flag if flag.startswith("-") else "an argument")
            raise LabError(f"{about} is empty; give it a value, or leave it out")
