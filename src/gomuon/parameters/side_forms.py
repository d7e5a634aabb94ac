"""The form of a side's captured factor and map: whole, block-diagonal, diagonal or identity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gomuon.moments import Shape

# What a LayerSpec may say of a side: the length of its blocks, or a form.
SideChoice = int | Literal["whole", "diagonal", "identity"]
LEFT, RIGHT = 0, 1  # the outputs' side of a matrix and the inputs' side
LONG_SIDES = ("block_size", "max_side", "long_sides")  # the settings that choose a form


@dataclass(frozen=True)
class SideForm:
    """The form of the factor and the map of one side of a matrix.

    Attributes:
        side: the length d of the side.
        kind: "identity": there is no factor, and nothing is captured.
        blocks: the number of blocks of a "matrix"; 1 if it is whole.
    """

    side: int
    kind: Literal["matrix", "diagonal", "identity"] = "matrix"
    blocks: int = 1

    @property
    def size(self) -> int:
        """The side of a block. The last block may be longer than its piece of the side."""
        return -(-self.side // self.blocks)

    @property
    def last(self) -> int:
        """The length of the last piece of the side."""
        return self.side - (self.blocks - 1) * self.size

    def shape(self, where: int) -> Shape:
        """The shape of a factor on the left or the right side."""
        if self.kind == "diagonal":
            return (1, self.side) if where == RIGHT else (self.side, 1)
        return (self.blocks, self.size, self.size) if self.blocks > 1 else (self.side, self.side)

    def __str__(self) -> str:
        if self.kind == "identity":
            return "identity"
        if self.kind == "diagonal":
            return f"{self.side} as a diagonal"
        if self.blocks == 1:
            return f"{self.side}"
        if self.last == self.size:
            return f"{self.side} as {self.blocks}×{self.size}"
        equal = f"{self.blocks - 1}×{self.size}" if self.blocks > 2 else f"{self.size}"
        return f"{self.side} as {equal} + {self.last}"


def number_of_blocks(side: int, block_size: int) -> int:
    """How many pieces, none longer than `block_size`, a side is cut into.

    As few as possible, unless up to twice as many cut it into equal pieces.
    """
    fewest = -(-side // block_size)
    equal = (blocks for blocks in range(fewest, 2 * fewest + 1) if side % blocks == 0)
    return next(equal, fewest)


def form_of(side: int, choice: SideChoice | None) -> SideForm:
    """The form of a side of this length; None leaves it whole."""
    if choice == "identity" or choice == "diagonal":
        return SideForm(side, choice)
    if choice is None or choice == "whole":
        return SideForm(side)
    return SideForm(side, blocks=number_of_blocks(side, choice))


def choice_of(side: int, given: SideChoice | None, group: Mapping[str, Any]) -> SideChoice:
    """What is done with a side: what its LayerSpec says, otherwise what the settings say."""
    if given is not None:
        return given
    longest, block_size = group.get("max_side"), group.get("block_size")
    if longest is not None and side > longest:
        choice: SideChoice = group.get("long_sides", "identity")
        return choice
    return "whole" if block_size is None else block_size


def captured_maps(
    forms: tuple[SideForm, SideForm], captured: tuple[bool, bool]
) -> list[tuple[int, int]]:
    """(number, side) of the matrices that the left and the right map are made of.

    (0, 0) where there is no map, or only a diagonal.
    """
    return [
        (form.blocks, form.size) if has_map and form.kind == "matrix" else (0, 0)
        for form, has_map in zip(forms, captured, strict=True)
    ]


def described(
    forms: tuple[SideForm, SideForm],
    captured: tuple[bool, bool],
    matrices: int,
    max_side: int | None,
) -> str:
    """One line for the routing table, such as "512 × 2048 as 2×1024".

    Args:
        forms: of the left and the right side.
        captured: whether the method captures (left, right).
        matrices: how many matrices the parameter is cut into.
        max_side: the setting, if it applies to this parameter.
    """
    sides = []
    for form, has_map in zip(forms, captured, strict=True):
        long = max_side is not None and form.side > max_side and has_map
        reason = f" (side {form.side} > max_side)" if long and form.kind == "identity" else ""
        sides.append(f"{form}{reason}" if has_map else "identity")
    text = "identity" if set(sides) == {"identity"} else " × ".join(sides)
    return text if matrices == 1 else f"{matrices} of {text}"
