"""What is tried before a race with code from outside: one update of each arm, and continuing.

The first finds what a class refuses or returns wrongly before anything is written. The second
finds out whether a run that is stopped can continue from a checkpoint as if it had not been.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import own_code
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results.pairing import hash_parameters
from gomuon.lab.results.runs import CHECKPOINT, CONTINUATION
from gomuon.lab.running.session import Diverged, Session

BEFORE, AFTER = 2, 2  # updates before a checkpoint and after it


def try_arms(plan: Plan, data_dir: str | Path | None) -> None:
    """Make one update with every kind of arm that has code or settings of the user's own.

    Raises:
        LabError: a class refuses its settings or the parameters, or returns something wrong.
    """
    tried: list[Any] = []
    for arm in plan.arms:
        kind = (arm.optimizer, arm.options)
        if kind in tried or not (plan.own or arm.options):
            continue
        tried.append(kind)
        config = plan.config(arm, plan.seeds[0], arm.lr or arm.grid[0])
        session = Session(dataclasses.replace(config, steps=1, telemetry=False), data_dir)
        if own_code.is_own(config.task) or own_code.is_own(config.optimizer):
            try:
                session.update(1)
            except Diverged:
                continue  # a rate may be too high; the race will show it


@dataclass(frozen=True)
class Continuation:
    """How a run goes on after it was stopped.

    Attributes:
        checkpoints: whether it continues from its last checkpoint; otherwise it starts again.
        problem: why it does not end in the same bytes, or starts again; "" if neither.
    """

    checkpoints: bool = True
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, value: Any, where: Path) -> Continuation:
        """What a manifest recorded; errors name the file `where`."""
        try:
            checkpoints, problem = value["checkpoints"], value["problem"]
            if not isinstance(checkpoints, bool) or not isinstance(problem, str):
                raise TypeError
        except (KeyError, TypeError) as error:
            raise LabError(
                f"{where}: {CONTINUATION!r} is {value!r}; expected checkpoints and problem; delete "
                "this run's folder and run the command again"
            ) from error
        return cls(checkpoints, problem)


def try_continuing(config: RunConfig, data_dir: str | Path | None) -> Continuation:
    """Find out by a few updates whether a run continues exactly.

    An optimizer may keep numbers outside its state_dict, or a task may remember what it did.
    """
    last = BEFORE + AFTER
    if config.steps < last or not (
        own_code.is_own(config.task) or own_code.is_own(config.optimizer)
    ):
        return Continuation()
    config = dataclasses.replace(config, telemetry=False)
    with tempfile.TemporaryDirectory(prefix="gomuon-") as folder:
        path = Path(folder) / CHECKPOINT
        whole = Session(config, data_dir)
        _outcomes(whole, 1, BEFORE)
        try:
            whole.save(path, BEFORE, {})
        except Exception as error:  # pickle and torch may raise anything
            return _starts_again(config, f"its state cannot be saved ({_said(error)})")
        expected = _outcomes(whole, BEFORE + 1, last)
        continued = Session(config, data_dir)
        try:
            continued.load(path)
            found = _outcomes(continued, BEFORE + 1, last)
        except Exception as error:  # load_state_dict and step may raise anything
            return _starts_again(config, f"its saved state cannot be loaded ({_said(error)})")
    if found == expected:
        return Continuation()
    again = Session(config, data_dir)
    _outcomes(again, 1, BEFORE)
    if _outcomes(again, BEFORE + 1, last) == expected:
        return _starts_again(config, "loaded from a checkpoint it makes other updates")
    return Continuation(
        problem=f"{_names(config)} does not repeat exactly: the same {last} updates, made twice, "
        "differ; so a run that is stopped and continued does not end in the same bytes"
    )


def _outcomes(session: Session, first: int, last: int) -> list[Any]:
    """Losses and parameters after the updates, until the run diverges."""
    found: list[Any] = []
    for step in range(first, last + 1):
        try:
            line, _ = session.update(step)
        except Diverged:
            return [*found, "diverged"]
        found.append((line, hash_parameters(session.model)))
    return found


def _starts_again(config: RunConfig, reason: str) -> Continuation:
    return Continuation(
        checkpoints=False,
        problem=f"{_names(config)} does not continue exactly: {reason}; so no checkpoints are "
        "kept, and a run that is stopped starts again from its first update",
    )


def _names(config: RunConfig) -> str:
    own = [name for name in (config.optimizer, config.task) if own_code.is_own(name)]
    return " with ".join(own)


def _said(error: Exception) -> str:
    said = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    return said.splitlines()[0][:200]
