"""What the state of a parameter may hold: every entry's name, kind and shape, as data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gomuon.functional.checks import shown
from gomuon.geometry import (
    CapturedMoments,
    CoupledFactors,
    Geometry,
    GradientGrams,
    PartnerGram,
    RotatingBasis,
    RowColumnNorms,
)
from gomuon.holdings import local
from gomuon.probes import working_dtype

Shape = tuple[int, ...]
LARGEST_COUNT = 2**63 - 1  # beyond it a power β^count cannot be computed


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into matrices, as far as it is known.

    Attributes:
        memories: the shapes in which a number for each element of the matrices may be kept.
        tiling: blocks along rows and columns, and the two sides of one; None if not known.
    """

    memories: frozenset[Shape]
    tiling: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Count:
    """A whole number >= 0; or the number of a step, which the group must have come to."""

    of_step: bool = False


@dataclass(frozen=True)
class Steps:
    """AdamW's count: a tensor of one whole number >= 0; a plain number is made one on loading."""


@dataclass(frozen=True)
class Memory:
    """A number for each of the parameter's: in its own shape, or as it is cut."""

    lowest: float = -math.inf
    cut: bool = True


@dataclass(frozen=True)
class Side:
    """A tensor for the left (0) or the right (1) side of the matrices.

    Attributes:
        side: which one.
        form: "matrix" is d × d, "values" d, "diagonal" d × 1 on the left and 1 × d on the right.
        one_for: one for every "block"; for every "strip" of blocks with the same rows (on the right
            the same columns); or "either".
        numbers: what they must be. "cosines" are within [-1, 1], as all numbers of a basis are;
            "definite" is a matrix that equations are solved with.
    """

    side: int
    form: Literal["matrix", "values", "diagonal"] = "matrix"
    one_for: Literal["block", "strip", "either"] = "block"
    numbers: Literal["any", "not negative", "cosines", "semidefinite", "definite"] = "any"

    def shapes(self, tiling: tuple[int, int, int, int]) -> list[Shape]:
        """The shapes allowed, the usual one first."""
        rows, columns, *sides = tiling
        strips, blocks, d = (rows, columns)[self.side], rows * columns, sides[self.side]
        counts = {"block": [blocks], "strip": [strips], "either": [strips, blocks]}[self.one_for]
        if self.one_for == "strip" and self.side == 1 and columns == 1:
            counts = [1, rows]  # of a convolution every group has inputs of its own
        return [(count, *self._last(d)) for count in counts]

    def is_possible(self, shape: Shape) -> bool:
        """Whether a tensor of this shape could be one, however the parameter is cut."""
        if len(shape) < 2:
            return False
        d = shape[1] if self.form != "diagonal" or self.side == 0 else shape[-1]
        return shape[1:] == self._last(d)

    def _last(self, d: int) -> Shape:
        if self.form == "matrix":
            return d, d
        if self.form == "values":
            return (d,)
        return (1, d) if self.side else (d, 1)


Entry = Count | Steps | Memory | Side


def _both(kind: str, **fields: Any) -> dict[str, Entry]:
    return {f"{name}_{kind}": Side(side, **fields) for side, name in enumerate(("left", "right"))}


ADAMW: dict[str, Entry] = {
    "step": Steps(),
    "exp_avg": Memory(cut=False),
    "exp_avg_sq": Memory(lowest=0.0, cut=False),
}
EVERY_METHOD: dict[str, Entry] = {
    **ADAMW,
    "updates": Count(),
    "failures": Count(),
    "momentum": Memory(),
    "square": Memory(lowest=0.0),
}
GEOMETRIES: dict[type[Geometry], dict[str, Entry]] = {
    CapturedMoments: {
        "left_seen": Count(of_step=True),
        "right_seen": Count(of_step=True),
        **_both("factor", one_for="strip", numbers="semidefinite"),
        **_both("map", one_for="either"),
        **_both("basis", one_for="either", numbers="cosines"),
        **_both("values", form="values", one_for="either", numbers="not negative"),
    },
    GradientGrams: {
        "observations": Count(),
        **_both("factor", numbers="semidefinite"),
        **_both("map"),
    },
    CoupledFactors: {**_both("factor", numbers="definite"), **_both("map")},
    RotatingBasis: {
        **_both("factor", numbers="semidefinite"),
        **_both("basis", numbers="cosines"),
    },
    RowColumnNorms: {
        **_both("factor", form="diagonal", numbers="not negative"),
        **_both("scale", form="diagonal", numbers="not negative"),
    },
    PartnerGram: {"right_map": Side(1)},
}
# Entries that are of no use without the others.
TOGETHER: tuple[tuple[str, ...], ...] = (
    tuple(ADAMW),
    ("observations", "left_factor", "right_factor"),
)


def entries_of(geometry: Geometry) -> tuple[Mapping[str, Entry], bool]:
    """What a method with this geometry keeps, and whether that is all it may keep."""
    own = next((table for kind, table in GEOMETRIES.items() if isinstance(geometry, kind)), None)
    is_ours = own is not None or type(geometry) is Geometry
    return {**EVERY_METHOD, **(own or {})}, is_ours


def check_together(entries: Mapping[str, Any], table: Mapping[str, Entry], name: str) -> None:
    """Raise a ValueError where one entry is there and another, which goes with it, is not."""
    for together in TOGETHER:
        there = [key for key in together if key in entries]
        lacking = [key for key in together if key in table and key not in entries]
        if together[0] in table and there and lacking:
            raise ValueError(
                f"the checkpoint lacks {lacking[0]} of {name!r}, which goes with {there[0]}"
            )


def is_count(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value <= LARGEST_COUNT


@dataclass(frozen=True)
class Place:
    """The parameter that an entry is checked for.

    Attributes:
        name: for messages.
        parameter: itself.
        cut: how it is cut.
        step: how many steps its group has made.
        finite: whether NaN and infinity are refused.
    """

    name: str
    parameter: Tensor
    cut: Cut
    step: int
    finite: bool


def checked(key: str, value: Any, entry: Entry, place: Place) -> Any:
    """The value as it is loaded.

    Raises:
        ValueError: it is not of the entry's kind, shape or range; the message says what it is.
    """
    what = f"{key} of {place.name!r}"
    if isinstance(entry, Count):
        if not is_count(value):
            raise ValueError(
                f"{what} is {shown(value)} in the checkpoint; expected a whole number >= 0"
            )
        if entry.of_step and value > place.step:
            raise ValueError(
                f"{what} is {value} in the checkpoint, but its group has made {place.step} steps"
            )
        return value
    if isinstance(entry, Steps):
        return _steps(what, value)
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is {shown(value)} in the checkpoint; expected a tensor")
    here = local(value)
    if here.layout != torch.strided or here.dtype not in _FLOATING:
        raise ValueError(
            f"{what} is {here.dtype}, {here.layout} in the checkpoint; expected a dense tensor of "
            f"one of {', '.join(map(str, _FLOATING))}"
        )
    if here.is_meta and not place.parameter.is_meta:
        raise ValueError(f"{what} is on the meta device in the checkpoint: it holds no numbers")
    if isinstance(entry, Memory):
        _check_memory(what, value, entry, place)
    else:
        _check_side(what, value, entry, place)
    return value


def check_numbers(key: str, value: Any, entry: Entry, place: Place) -> None:
    """Raise a ValueError where a tensor of the right shape holds what no training would make."""
    if not isinstance(entry, (Memory, Side)) or local(value).is_meta:
        return
    what = f"{key} of {place.name!r}"
    here = local(value).detach()
    # As the step will have it: what float64 holds may be infinite in float32.
    here = here.to(working_dtype(place.parameter)) if here.dtype == torch.float64 else here
    if not here.isfinite().all():
        if place.finite:
            raise ValueError(
                f"{what} holds NaN or infinity in the checkpoint; take an earlier one, or save and "
                'load with nonfinite="allow"'
            )
        return
    low, high = _range(entry)
    if (here < low).any() or (here > high).any():
        raise ValueError(
            f"{what} has numbers from {float(here.min()):g} to {float(here.max()):g} in the "
            f"checkpoint; expected them from {low:g} to {high:g}"
        )
    if isinstance(entry, Side) and entry.numbers in ("semidefinite", "definite"):
        reason = _not_a_factor(here, definite=entry.numbers == "definite")
        if reason is not None:
            raise ValueError(
                f"{what} is {reason} in the checkpoint, which no average of squares is"
            )


_ROUNDING = 4e-3  # of a state that somebody has kept in bfloat16 to save space
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _range(entry: Memory | Side) -> tuple[float, float]:
    if isinstance(entry, Memory):
        return entry.lowest, math.inf
    if entry.numbers == "cosines":
        return -1 - _ROUNDING, 1 + _ROUNDING
    return (0.0 if entry.numbers == "not negative" else -math.inf), math.inf


def _steps(what: str, value: Any) -> Tensor:
    """On the host and in float32, where AdamW counts; older checkpoints have plain numbers."""
    number = value
    if isinstance(value, Tensor):
        here = local(value)
        usable = here.numel() == 1 and here.layout == torch.strided and not here.is_meta
        number = here.item() if usable else None
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not 0 <= number <= LARGEST_COUNT or number != int(number):
        raise ValueError(
            f"{what} is {shown(value if number is None else number)} in the checkpoint; expected "
            "one whole number >= 0"
        )
    return torch.tensor(float(number), dtype=torch.float32)


def _check_memory(what: str, value: Tensor, entry: Memory, place: Place) -> None:
    shape, own, cut = tuple(value.shape), tuple(place.parameter.shape), place.cut
    allowed = cut.memories if entry.cut else {own}
    unknown = entry.cut and cut.tiling is None and len(shape) == 3
    if shape not in allowed and not unknown:
        cuts = "" if own in allowed else f", cut into {sorted(allowed) or 'no matrix'}"
        raise ValueError(
            f"{what} has shape {shape} in the checkpoint, the parameter has {own}{cuts}"
        )


def _check_side(what: str, value: Tensor, entry: Side, place: Place) -> None:
    shape, tiling = tuple(value.shape), place.cut.tiling
    possible = entry.is_possible(shape)
    if tiling is None:
        if not possible:
            raise ValueError(
                f"{what} has shape {shape} in the checkpoint; expected [blocks, d, d] or the like"
            )
        return
    allowed = entry.shapes(tiling)
    if shape in allowed:
        return
    d = tiling[2 + entry.side]
    found = max(shape[1:]) if possible else d
    if found != d:
        raise ValueError(
            f"{what} is for matrices with a side of {found} in the checkpoint, here that side has "
            f"{d}; was it saved with other specs, or with another block_size?"
        )
    raise ValueError(
        f"{what} has shape {shape} in the checkpoint; expected "
        f"{' or '.join(map(str, dict.fromkeys(allowed)))}"
    )


def _not_a_factor(S: Tensor, *, definite: bool) -> str | None:
    """Why matrices [b, d, d] cannot be averages of squares; None if they can be, rounded."""
    if not S.numel():
        return None
    S = S.cpu() if S.device.type == "mps" else S
    S = S if S.dtype == torch.float64 else S.float()
    largest = S.abs().amax(dim=(-2, -1), keepdim=True)
    S = S / torch.where(largest > 0, largest, 1.0)
    if ((S - S.mT).abs() > _ROUNDING).any():
        return "not symmetric"
    if definite and torch.linalg.lu_factor_ex(S)[2].any():
        return "singular"
    eye = torch.eye(S.shape[-1], device=S.device)
    trace = S.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    # A layer without gradients has a factor of zeros.
    lifted = torch.where(largest > 0, (S + _ROUNDING * trace * eye).float(), eye)
    if torch.linalg.cholesky_ex(lifted).info.any():
        return "not positive semidefinite"
    return None
