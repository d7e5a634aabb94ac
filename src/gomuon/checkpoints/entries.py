"""Checks of the entries in a parameter's saved state: type, shape and values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import describe_value
from gomuon.functional.linalg import is_diagonal, working_dtype
from gomuon.functional.narrow import LARGEST, blocks_of
from gomuon.parameters.sharding import local
from gomuon.parameters.state import (
    MOMENTUM,
    SCALES,
    TOGETHER,
    Count,
    Cut,
    EachCount,
    Entry,
    FewNumbers,
    Memory,
    Scales,
    Side,
    Steps,
)

LARGEST_COUNT = 2**63 - 1  # beyond it a power β^count cannot be computed


def check_together(entries: Mapping[str, Any], table: Mapping[str, Entry], name: str) -> None:
    """Raise a ValueError if an entry is missing that another entry needs."""
    for together in TOGETHER:
        there = [key for key in together if key in entries]
        lacking = [key for key in together if key in table and key not in entries]
        if together[0] in table and there and lacking:
            raise ValueError(
                f"the checkpoint lacks {lacking[0]} of {name!r}, which {there[0]} needs; load a "
                "complete checkpoint"
            )


def is_count(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value <= LARGEST_COUNT


@dataclass(frozen=True)
class CheckedParameter:
    """A parameter whose saved entries are checked.

    Attributes:
        name: the parameter's name, for messages.
        parameter: the parameter.
        cut: how it is cut into matrices.
        step: how many steps its group has taken.
        finite: whether to reject NaN and infinity.
        coded: whether the checkpoint itself says that the momentum has 8 bits.
    """

    name: str
    parameter: Tensor
    cut: Cut
    step: int
    finite: bool
    coded: bool = False


def checked_entry(key: str, value: Any, entry: Entry, target: CheckedParameter) -> Any:
    """The value to load.

    Raises:
        ValueError: the type, shape or range is wrong. The message names the value.
    """
    what = f"{key} of {target.name!r}"
    if isinstance(entry, Count):
        if not is_count(value):
            raise ValueError(
                f"{what} is {describe_value(value)} in the checkpoint; expected a whole number >= 0"
            )
        if entry.of_step and value > target.step:
            raise ValueError(
                f"{what} is {value} in the checkpoint, but its group has taken {target.step} "
                "steps; expected at most that number"
            )
        return value
    if isinstance(entry, Steps):
        return _steps(what, value)
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is {describe_value(value)} in the checkpoint; expected a tensor")
    here, allowed = local(value), _dtypes(key)
    if here.layout != torch.strided or here.dtype not in allowed:
        raise ValueError(
            f"{what} is {here.dtype}, {here.layout} in the checkpoint; expected a dense tensor of "
            f"one of {', '.join(map(str, allowed))}"
        )
    if here.is_meta and not target.parameter.is_meta:
        raise ValueError(f"{what} is on the meta device in the checkpoint, so it has no values")
    if isinstance(entry, Memory):
        _check_memory(what, value, entry, target)
    elif isinstance(entry, Side):
        _check_side(what, value, entry, target)
    elif isinstance(entry, EachCount):
        _check_each_count(what, value, target)
    elif isinstance(entry, FewNumbers):
        _check_few(what, value, entry, target)
    return value


def _check_each_count(what: str, value: Tensor, target: CheckedParameter) -> None:
    stack = target.cut.tiling.stack if target.cut.tiling else None
    if value.ndim != 1 or stack not in (None, len(value)):
        raise ValueError(
            f"{what} has shape {tuple(value.shape)} in the checkpoint; expected one number for "
            f"each of {stack or 'its'} matrices"
        )
    here = local(value)
    if not here.is_meta and not bool(((here >= 0) & (here <= target.step)).all()):
        raise ValueError(
            f"{what} is {here.tolist()} in the checkpoint, but its group has taken {target.step} "
            "steps; expected numbers from 0 to that"
        )


def _check_few(what: str, value: Tensor, entry: FewNumbers, target: CheckedParameter) -> None:
    shape, tiling = tuple(value.shape), target.cut.tiling
    blocks = tiling.blocks if tiling else shape[0] if shape else 1
    if shape != (blocks, 1, entry.count):
        raise ValueError(
            f"{what} has shape {shape} in the checkpoint; expected {(blocks, 1, entry.count)}"
        )


def check_codes(entries: Mapping[str, Any], target: CheckedParameter) -> None:
    """Raise a ValueError if a momentum in 8 bits lacks scales, or has those of another tensor."""
    momentum, scales = entries.get(MOMENTUM), entries.get(SCALES)
    is_coded = momentum is not None and momentum.dtype == torch.int8
    if target.coded and momentum is not None and not is_coded:
        # torch.distributed.checkpoint copies codes into a tensor of any dtype, without a word.
        raise ValueError(
            f"momentum of {target.name!r} is {momentum.dtype} in a checkpoint of "
            'state_dtype="int8"; load it with an optimizer that is made with state_dtype="int8"'
        )
    if is_coded != (scales is not None):
        there, lacking = ("a momentum in 8 bits", SCALES) if is_coded else (SCALES, "its momentum")
        raise ValueError(
            f"the checkpoint has {there} of {target.name!r}, but not {lacking}; load a complete "
            "checkpoint"
        )
    if momentum is None or scales is None:
        return
    tiling, shape = target.cut.tiling, tuple(scales.shape)
    blocks = tiling.blocks if tiling else shape[0] if shape else 1
    expected = (blocks, blocks_of(momentum.numel() // max(1, blocks)))
    if shape != expected:
        raise ValueError(
            f"{SCALES} of {target.name!r} has shape {shape} in the checkpoint; expected {expected}"
        )


def check_numbers(key: str, value: Any, entry: Entry, target: CheckedParameter) -> None:
    """Raise a ValueError if a tensor holds values that training cannot produce."""
    if not isinstance(entry, (Memory, FewNumbers, Scales, Side)) or local(value).is_meta:
        return
    what = f"{key} of {target.name!r}"
    here = local(value).detach()
    # In the step's precision: a finite float64 value may be infinite in float32.
    here = here.to(working_dtype(target.parameter)) if here.dtype == torch.float64 else here
    if not here.isfinite().all():
        if target.finite:
            raise ValueError(
                f"{what} holds NaN or infinity in the checkpoint; load an earlier checkpoint, or "
                'save and load with nonfinite="allow"'
            )
        return
    low, high = (-LARGEST, LARGEST) if here.dtype == torch.int8 else _range(entry)
    if (here < low).any() or (here > high).any():
        raise ValueError(
            f"{what} has values from {float(here.min()):g} to {float(here.max()):g} in the "
            f"checkpoint; expected values from {low:g} to {high:g}"
        )
    if isinstance(entry, Side) and entry.numbers in ("semidefinite", "definite"):
        reason = _factor_defect(here, definite=entry.numbers == "definite")
        if reason is not None:
            raise ValueError(
                f"{what} is {reason} in the checkpoint; expected an average of squares"
            )


_ROUNDING = 4e-3  # of a state that was stored in bfloat16 to save space
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _dtypes(key: str) -> tuple[torch.dtype, ...]:
    """The dtypes that an entry may be saved in."""
    if key == SCALES:
        return (torch.float32,)
    return (*_FLOATING, torch.int8) if key == MOMENTUM else _FLOATING


def _range(entry: Memory | FewNumbers | Scales | Side) -> tuple[float, float]:
    if isinstance(entry, (Memory, FewNumbers)):
        return entry.lowest, math.inf
    if isinstance(entry, Scales):
        return 0.0, math.inf
    if entry.numbers == "cosines":
        return -1 - _ROUNDING, 1 + _ROUNDING
    return (0.0 if entry.numbers == "not negative" else -math.inf), math.inf


def _steps(what: str, value: Any) -> Tensor:
    """AdamW's count as a float32 tensor on the CPU. Older checkpoints have a Python number."""
    number = value
    if isinstance(value, Tensor):
        here = local(value)
        usable = here.numel() == 1 and here.layout == torch.strided and not here.is_meta
        number = here.item() if usable else None
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not 0 <= number <= LARGEST_COUNT or number != int(number):
        raise ValueError(
            f"{what} is {describe_value(value if number is None else number)} in the checkpoint; "
            "expected one whole number >= 0"
        )
    return torch.tensor(float(number), dtype=torch.float32)


def _check_memory(what: str, value: Tensor, entry: Memory, target: CheckedParameter) -> None:
    shape, own, cut = tuple(value.shape), tuple(target.parameter.shape), target.cut
    allowed = cut.memories if entry.cut else {own}
    unknown = entry.cut and cut.tiling is None and len(shape) == 3
    if shape not in allowed and not unknown:
        cuts = "" if own in allowed else f", cut into {sorted(allowed) or 'no matrix'}"
        raise ValueError(
            f"{what} has shape {shape} in the checkpoint, but the parameter has {own}{cuts}"
        )


def _check_side(what: str, value: Tensor, entry: Side, target: CheckedParameter) -> None:
    shape, tiling = tuple(value.shape), target.cut.tiling
    low, high = entry.lengths(shape)
    if tiling is None:
        if not high:
            raise ValueError(
                f"{what} has shape {shape} in the checkpoint; expected a shape such as "
                "[blocks, d, d]"
            )
        return
    if entry.allows(shape, tiling):
        return
    d = tiling.sides[entry.side]
    if high and not low <= d <= high:
        raise ValueError(
            f"{what} is for matrices with a side of {high} in the checkpoint, but here that side "
            f"is {d}; load it with the specs and the block_size it was saved with"
        )
    raise ValueError(
        f"{what} has shape {shape} in the checkpoint; expected "
        f"{' or '.join(map(str, dict.fromkeys(entry.shapes(tiling))))}"
    )


def _factor_defect(S: Tensor, *, definite: bool) -> str | None:
    """Why matrices [..., d, d] cannot be averages of squares; None if they can (up to rounding)."""
    if not S.numel():
        return None
    if is_diagonal(S):
        return "negative" if (S < 0).any() else None
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
    # A layer that had no gradients has a zero factor.
    shifted = torch.where(largest > 0, (S + _ROUNDING * trace * eye).float(), eye)
    if torch.linalg.cholesky_ex(shifted).info.any():
        return "not positive semidefinite"
    return None
