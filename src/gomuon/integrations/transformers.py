"""For Transformers' Trainer on several ranks: checkpoints with the whole state."""

from typing import Any

import torch
from transformers import TrainerCallback

from gomuon.optimizer import MatrixOptimizer


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


def _gather(args: Any, optimizer: torch.optim.Optimizer | None) -> None:
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    if isinstance(inner, MatrixOptimizer) and not args.save_only_model:
        inner.consolidate_state_dict()
