"""Checks of the entries in a parameter's saved state: kind, shape and numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import shown
from gomuon.functional.linalg import working_dtype
from gomuon.parameters.sharding import local
from gomuon.parameters.state import TOGETHER, Count, Cut, Entry, Memory, Side, Steps

LARGEST_COUNT = 2**63 - 1  # beyond it a power β^count cannot be computed


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
