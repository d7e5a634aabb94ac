"""What an optimizer tells its user: each message once."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gomuon.errors import GeometryWarning
from gomuon.parameters.stacks import Layer


class Reports:
    """Warnings that are given once, and failures that are counted in the layers' states."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn_once(self, message: str) -> None:
        """Warn, unless the same was said before."""
        if message not in self._given:
            self._given.add(message)
            _warn(message)

    def failed(self, layers: Iterable[Layer]) -> None:
        """Count results that could not be used, and warn of each layer once."""
        for layer in layers:
            layer.state["failures"] = layer.state.get("failures", 0) + 1
            self.warn_once(
                f"what was computed for {layer.name!r} was not finite, or could not be decomposed; "
                "it was left out and the layer keeps what it had (counted in its state as "
                "'failures')"
            )

    def blind(self, names: Sequence[str]) -> None:
        """Layers of a model that have no geometry although it was their turn to be captured."""
        self.warn_once(
            f"nothing was captured of {', '.join(map(repr, names))}: since the last step no "
            "forward pass in training mode went through its module. It runs on identity maps, as "
            "Muon does (a model compiled and run before its optimizer was made ignores hooks until "
            "torch.compiler.reset() is called)"
        )

    def without_model(self, method: str) -> None:
        """A method that captures was given parameters."""
        self.warn_once(
            f"{method} was given parameters, not a model, so nothing is captured and its maps are "
            "the identity, that is Muon; pass the model itself"
        )

    def alone_among_ranks(self) -> None:
        """Several ranks, and no wrapper that averages gradients was seen."""
        self.warn_once(
            "there are several ranks, but the model was not seen inside "
            "DistributedDataParallel, so each trains alone, on statistics of its own. If they "
            "train one model, give the optimizer the wrapped model, or pass "
            'work="shared" if you average gradients yourself; else pass work="alone"'
        )

    def partial_checkpoint(self, names: Sequence[str]) -> None:
        """A loaded checkpoint lacks states that this rank should have."""
        _warn(
            f"the checkpoint lacks the state of {names[0]!r} and {len(names) - 1} more, which "
            "begin anew: it looks like one rank's part. Save with consolidated_state_dict() or "
            "torch.distributed.checkpoint"
        )


# Folders whose lines no warning should point at: it is the user's line that causes it.
_NOT_THE_USERS = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


def _warn(message: str) -> None:
    """Warn with the line of the user's program that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GeometryWarning, stacklevel=level)
