"""Checks gradients on an accelerator without waiting for it: the answer comes some steps later."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.functional.linalg import working_dtype
from gomuon.parameters.gradient_faults import Gradients


@dataclass(frozen=True)
class LateAnswer:
    """What the check of a step found.

    Attributes:
        step: the number of the step, from 1.
        bad: the names of gradients that cannot be used.
        overflowed: whether the step before left out results that were not finite.
    """

    step: int
    bad: tuple[str, ...]
    overflowed: bool


@dataclass(frozen=True)
class _Pending:
    step: int
    names: Sequence[str]
    flags: Tensor  # on the host, once `copied` has happened
    copied: Any  # an event of the device; None on the host


class LateCheck:
    """Asks in every step whether the gradients are finite, and reads answers that have arrived.

    Reading an answer at once would make the host wait until the device has computed everything
    that was queued before it.
    """

    def __init__(self) -> None:
        self.pending: deque[_Pending] = deque()  # questions that have no answer yet

    def ask(self, step: int, gradients: Gradients, overflows: Sequence[Tensor]) -> Tensor:
        """Whether all gradients can be used, as a scalar on their device.

        Args:
            step: the number of the step, from 1.
            gradients: the gradients by name, on one device or several; at least one.
            overflows: masks of results that the last step left out.
        """
        usable = [_is_usable(gradient) for _, gradient in gradients]
        device = usable[0].device
        flags = torch.stack(
            [flag.to(device, non_blocking=True) for flag in usable]
            + [mask.any().logical_not().to(device, non_blocking=True) for mask in overflows]
        )
        names = [name for name, _ in gradients]
        on_host = flags.to("cpu", non_blocking=True)
        self.pending.append(_Pending(step, names, on_host, _recorded_event(device)))
        return flags[: len(usable)].all()

    def answers(self) -> list[LateAnswer]:
        """The answers that have arrived since the last call. Never waits."""
        arrived = []
        while self.pending and _has_happened(self.pending[0].copied):
            pending = self.pending.popleft()
            flags = pending.flags.tolist()
            bad = [name for name, fine in zip(pending.names, flags, strict=False) if not fine]
            overflowed = not all(flags[len(pending.names) :])
            arrived.append(LateAnswer(pending.step, tuple(bad), overflowed))
        return arrived

    def forget(self) -> None:
        """Drop questions that have no answer yet."""
        self.pending.clear()


def _is_usable(gradient: Tensor) -> Tensor:
    """Whether the squares of a gradient can be summed, in the step's precision."""
    return torch.linalg.vector_norm(gradient, dtype=working_dtype(gradient)).isfinite()


def _recorded_event(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    event = torch.Event(device.type)
    event.record()
    return event


def _has_happened(event: Any) -> bool:
    return event is None or bool(event.query())
