"""Warnings of an optimizer to its user. Each warning is given once."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gomuon.errors import GeometryWarning
from gomuon.parameters.layers import Layer


class Reports:
    """Warnings that are given once, and failures that are counted in the layers' states."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn_once(self, message: str, key: str = "") -> None:
        """Warn, unless this warning was given before, or another one with this key."""
        if (key or message) not in self._given:
            self._given.add(key or message)
            _warn(message)

    def warn_if(self, message: str | None, key: str = "") -> None:
        """Warn once, if there is a message."""
        if message is not None:
            self.warn_once(message, key)

    def count_failures(self, layers: Iterable[Layer]) -> None:
        """Count results that could not be used, and warn once for each layer."""
        for layer in layers:
            layer.count("failures")
            self.warn_once(
                f"a result for {layer.name!r} was not finite, or a decomposition failed; the new "
                "result was left out and the layer keeps the old one (its state counts these as "
                "'failures')"
            )

    def nothing_captured(self, names: Sequence[str], why: str, missed: int) -> None:
        """Warn, once for every cause, that layers have no geometry or only an old one.

        Args:
            names: the layers' names.
            why: the cause, and what to do.
            missed: how many refreshes in a row a layer with maps has missed; 0: it has no maps.
        """
        since = f" in {missed} refreshes" if missed else ""
        uses = "Its maps stay as they are" if missed else "It uses identity maps, like Muon"
        layers = ", ".join(map(repr, names))
        self.warn_once(f"nothing was captured for {layers}{since}: {why}. {uses}", key=why)

    def without_model(self, method: str) -> None:
        """Warn that a method that captures was given parameters instead of a model."""
        self.warn_once(
            f"{method} was given parameters, not a model, so nothing is captured and all maps are "
            "the identity, as in Muon; and unless a group's treatment says otherwise, everything "
            "with two or more dimensions is a matrix, embeddings and heads too; pass the model "
            "itself, or model= beside your groups"
        )

    def alone_among_ranks(self) -> None:
        """Warn that there are several ranks, but no wrapper that averages gradients."""
        self.warn_once(
            "there are several ranks, but no DistributedDataParallel around the model was found. "
            "So each rank trains alone, with its own statistics. If the ranks train one model, "
            'give the optimizer the wrapped model, or pass work="shared" if you average gradients '
            'yourself; otherwise pass work="alone"'
        )

    def part_of_state(self) -> None:
        """Warn that state_dict() has only one rank's part, unless the caller saves all parts."""
        # torch.distributed.checkpoint asks every rank and saves every part.
        if not _called_from(_SAVES_EVERY_PART):
            self.warn_once(
                "state_dict() has only this rank's part of the state, because the ranks share the "
                "work. To save the whole state in one file, call consolidate_state_dict() on all "
                "ranks first; then state_dict() of rank 0 is whole (for Transformers' Trainer pass "
                "callbacks=[gomuon.integrations.transformers.GatherState()])"
            )

    def partial_checkpoint(self, names: Sequence[str]) -> None:
        """Warn that a loaded checkpoint lacks states that this rank needs."""
        _warn(
            f"the checkpoint lacks the state of {names[0]!r} and {len(names) - 1} more, which "
            "start from zero: it seems to be the part of one rank. Call consolidate_state_dict() "
            "on all ranks before saving, or save with torch.distributed.checkpoint"
        )

    def changed_since(self, method: str, changed: str) -> None:
        """Warn that a loaded checkpoint is of an older version, whose method was another one."""
        _warn(f"this checkpoint is of an older {method}: {changed}")


# Warnings should point at the user's line, not at lines in these folders.
_NOT_THE_USERS = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))

_SAVES_EVERY_PART = str(Path(torch.__file__).parent / "distributed" / "checkpoint")


def _called_from(folder: str) -> bool:
    """Whether code in this folder of torch called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        if frame.f_code.co_filename.startswith(folder):
            return True
        frame = frame.f_back
    return False


def _warn(message: str) -> None:
    """Warn with the line of the user's program that caused the warning."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GeometryWarning, stacklevel=level)
