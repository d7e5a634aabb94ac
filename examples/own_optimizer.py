"""An optimizer of one's own: steps of one length for every parameter, by the sign of a momentum.

gomuon race --task examples/own_task.py:Checkerboard --optimizers examples/own_optimizer.py:SignMomentum,go-muon
"""  # noqa: E501 (the command is one line)

from collections.abc import Iterable

import torch


class SignMomentum(torch.optim.Optimizer):
    """w ← w − lr · sign(m), with m ← momentum · m + (1 − momentum) · gradient."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 1e-3, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.add_(average.sign(), alpha=-group["lr"])
