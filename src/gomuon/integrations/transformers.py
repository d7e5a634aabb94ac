"""For Transformers' Trainer: checkpoints with the whole state of several ranks, and watching."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import TrainerCallback

from gomuon.optimizer import MatrixOptimizer
from gomuon.watching.watch import Watch, Writer


class GatherState(TrainerCallback):
    """Gathers the optimizer's state on rank 0 before the Trainer saves a checkpoint.

    The Trainer asks only rank 0 for its state, and then rank 0 cannot ask the others: they are
    elsewhere. All ranks call callbacks, and whether the Trainer is going to save is known then.
    On one rank it does nothing. Put it after callbacks that decide to save.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer saves after this if it saves by steps."""
        if control.should_save:
            _gather(args, kwargs.get("optimizer"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer saves after this if it saves by epochs."""
        if control.should_save:
            _gather(args, kwargs.get("optimizer"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer may save after this if it saves the best model; it decides too late."""
        if args.save_strategy == "best":
            _gather(args, kwargs.get("optimizer"))


class WatchTraining(TrainerCallback):
    """Watches the Trainer's optimizer, if it is one of this package, while it trains.

    Args:
        every, to, spectra, gather: as for `MatrixOptimizer.watch`.
        doctor: whether to print at the end what looks wrong.
    """

    def __init__(
        self,
        every: int = 10,
        *,
        to: Writer | Iterable[Writer],
        spectra: int = 6,
        gather: bool = False,
        doctor: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = {"spectra": spectra, "gather": gather, "to": to}
        self._every, self._doctor = every, doctor
        self._watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if isinstance(optimizer, MatrixOptimizer):
            self._watch = optimizer.watch(self._every, **self._settings)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the doctor's findings if asked, and stop watching."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if self._watch is not None:
            if self._doctor and isinstance(optimizer, MatrixOptimizer):
                print(optimizer.doctor())
            self._watch.remove()
            self._watch = None


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _gather(args: Any, optimizer: torch.optim.Optimizer | None) -> None:
    inner = _unwrapped(optimizer)
    if isinstance(inner, MatrixOptimizer) and not args.save_only_model:
        inner.consolidate_state_dict()
