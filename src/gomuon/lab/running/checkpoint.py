"""Checkpoints of a run: model, optimizer, and its position in the run's files.

A checkpoint may be damaged or belong to another run. It is checked against the configuration and
the run's files before any of their lines is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.foreign import AnyOptimizer, parts_of
from gomuon.lab.files import read_first_lines, readable_size, write_atomically
from gomuon.optimizer import MatrixOptimizer

FORMAT = 1
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: its last update.
        lengths: file name -> its bytes at that time.
        counts: what was counted up to that time.
    """

    step: int
    lengths: dict[str, int]
    counts: dict[str, int]


def save(path: Path, model: nn.Module, optimizer: AnyOptimizer, position: Position) -> None:
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
    optimizer: AnyOptimizer,
    *,
    steps: int,
    files: tuple[str, ...],
    counts: tuple[str, ...],
) -> Position:
    """Load a checkpoint into the newly built model and optimizer of a run.

    Args:
        path: the checkpoint, in the run's folder.
        model: as the run's configuration builds it.
        optimizer: the same.
        steps: updates of the whole run.
        files: names of the run's files that get a line with each update.
        counts: names of what is counted.

    Raises:
        LabError: the checkpoint cannot be used; the message says what to do.
    """
    settings = _settings(optimizer)
    try:
        readable_size(path)
        state = torch.load(path, weights_only=True)
        position = _position(state, steps, files, counts)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if _settings(optimizer) != settings:
            raise ValueError("the settings of its optimizer are not those of the run")
        for part in parts_of(optimizer):
            _check_state(part, position.step)
    except Exception as error:  # torch may raise anything for a damaged file
        raise unusable(path, error) from error
    for name in files:
        _check_lines(path, name, position)
    return position


def unusable(path: Path, error: Exception) -> LabError:
    """The error for a checkpoint that cannot be used."""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return LabError(
        f"{path} cannot be used ({reason}); "
        "delete this run's folder and run the command again to repeat it"
    )


def _position(state: Any, steps: int, files: tuple[str, ...], counts: tuple[str, ...]) -> Position:
    if not isinstance(state, Mapping):
        raise TypeError(f"it has a {type(state).__name__}, not a checkpoint")
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}; this gomuon reads {FORMAT}")
    if not _whole(state["step"]) or state["step"] > steps:
        raise ValueError(f"its step is {state['step']!r}, but the run has {steps} updates")
    for name, wanted in (("lengths", files), ("counts", counts)):
        found = state[name]
        # Older versions wrote counts of runs that count nothing.
        fits = isinstance(found, Mapping) and set(found) >= set(wanted)
        if not fits or not all(map(_whole, found.values())):
            raise ValueError(f"its {name} are {found!r}; expected numbers of {', '.join(wanted)}")
    counted = {name: state["counts"][name] for name in counts}
    return Position(state["step"], dict(state["lengths"]), counted)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _settings(optimizer: AnyOptimizer) -> list[dict[str, Any]]:
    """The settings of each group that no update changes, unlike the rate and the step.

    A class from outside may keep what it likes in its groups, so they are not compared.
    """
    groups = [group for part in parts_of(optimizer) if _known(part) for group in part.param_groups]
    changing = ("params", "lr", "step")
    return [{name: group[name] for name in group if name not in changing} for group in groups]


def _known(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, MatrixOptimizer) or type(optimizer) is torch.optim.AdamW


def _check_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Check the step of ours, and all state of torch's AdamW, which checks nothing itself.

    Raises:
        ValueError: something is missing or has another size.
    """
    for group in optimizer.param_groups if _known(optimizer) else ():
        if group.get("step", step) != step:
            raise ValueError(f"its optimizer is at step {group['step']!r}, the run at {step}")
        if isinstance(optimizer, MatrixOptimizer):
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
    """Check that the part of a file to keep has one line for each update."""
    length, file = position.lengths[name], path.parent / name
    steps = [line.get("step") for line in read_first_lines(file, length)]
    if steps != list(range(1, position.step + 1)):
        raise LabError(
            f"{path} is at update {position.step}, but the first {length} bytes of {file.name} "
            "are not its updates; delete this run's folder and run the command again to repeat it"
        )


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:
        # torch reports a full disk as a RuntimeError.
        raise OSError(0, f"torch could not write it ({str(error).splitlines()[0]})") from error
