"""What a run continues from: model, optimizer, and where in its files it was.

A checkpoint may be damaged or not be this run's. Before a line of the run's files is cut off, all
of it is held to the run's configuration and to those files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gomuon.lab.errors import LabError
from gomuon.lab.files import read_first_lines, readable_size, write_atomically

FORMAT = 1
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class Position:
    """How far a run was.

    Attributes:
        step: its last update.
        lengths: file name -> bytes it had then.
        counts: alignment counts up to then.
    """

    step: int
    lengths: dict[str, int]
    counts: dict[str, int]


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position
) -> None:
    state = {
        "format": FORMAT,
        "step": position.step,
        "lengths": position.lengths,
        "counts": position.counts,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    write_atomically(path, lambda temporary: _save(state, temporary))


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    files: tuple[str, ...],
    counts: tuple[str, ...],
) -> Position:
    """Load a checkpoint into a model and an optimizer as they were built for the run.

    Args:
        path: the checkpoint, in the run's folder.
        model: of the run's configuration.
        optimizer: of the same.
        steps: updates of the whole run.
        files: names of the run's files that grow a line with each update.
        counts: names of the alignment counts.

    Raises:
        LabError: it cannot be continued from; the message names the file and what to do.
    """
    settings = [_settings(group) for group in optimizer.param_groups]
    try:
        readable_size(path)
        state = torch.load(path, weights_only=True)
        position = _position(state, steps, files, counts)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if [_settings(group) for group in optimizer.param_groups] != settings:
            raise ValueError("its optimizer has other settings than the run's")
        _check_state(optimizer, position.step)
    except Exception as error:  # whatever is in the file, torch may raise anything
        raise unusable(path, error) from error
    for name in files:
        _check_lines(path, name, position)
    return position


def unusable(path: Path, error: Exception) -> LabError:
    """What to say of a checkpoint that cannot be used, and to do about it."""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return LabError(
        f"{path} cannot be continued from ({reason}); "
        "delete this run's folder and run the campaign again to repeat it"
    )


def _position(state: Any, steps: int, files: tuple[str, ...], counts: tuple[str, ...]) -> Position:
    if not isinstance(state, Mapping):
        raise TypeError(f"it holds a {type(state).__name__}, not a checkpoint")
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}; this gomuon reads {FORMAT}")
    if not _whole(state["step"]) or state["step"] > steps:
        raise ValueError(f"its step is {state['step']!r}, but the run has {steps} updates")
    for name, wanted in (("lengths", files), ("counts", counts)):
        found = state[name]
        fits = isinstance(found, Mapping) and set(found) == set(wanted)
        if not fits or not all(map(_whole, found.values())):
            raise ValueError(f"its {name} are {found!r}; expected numbers of {', '.join(wanted)}")
    return Position(state["step"], dict(state["lengths"]), dict(state["counts"]))


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What no update changes: the rate follows the schedule, and the step counts updates."""
    return {name: group[name] for name in group if name not in ("params", "lr", "step")}


def _check_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Clocks agree with the checkpoint's, and torch's AdamW, which looks at nothing, has its own.

    Raises:
        ValueError: something is missing, or of another size.
    """
    for group in optimizer.param_groups:
        if group.get("step", step) != step:
            raise ValueError(f"its optimizer is at step {group['step']!r}, the run at {step}")
        if not isinstance(optimizer, torch.optim.AdamW):
            continue
        for parameter in group["params"] if step else ():
            state = optimizer.state.get(parameter, {})
            if set(state) != ADAMW_STATE:
                raise ValueError(f"its optimizer has {sorted(state)} for a parameter")
            for name, value in state.items():
                shape = torch.Size() if name == "step" else parameter.shape
                if value.shape != shape or not value.is_floating_point():
                    raise ValueError(f"{name} of a parameter is {value.dtype} {list(value.shape)}")
            if state["step"].item() != step:
                raise ValueError(f"a parameter is at step {state['step'].item():g}, not {step}")


def _check_lines(path: Path, name: str, position: Position) -> None:
    """The part of a file that is kept has a line for each update and nothing else."""
    length, file = position.lengths[name], path.parent / name
    steps = [line.get("step") for line in read_first_lines(file, length)]
    if steps != list(range(1, position.step + 1)):
        raise LabError(
            f"{path} is at update {position.step}, but the first {length} bytes of {file.name} "
            "are not its updates; delete this run's folder and run the campaign again to repeat it"
        )


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:
        # torch's writer reports a full disk as a RuntimeError of its own.
        raise OSError(0, f"torch could not write it ({str(error).splitlines()[0]})") from error
