"""Tasks and optimizers from outside, right ones and wrong ones, for tests to name."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gomuon import Muon

HERE = "tests.lab.helpers.own_classes"


class Line:
    """Fit a linear map; with dropout, so that random numbers are drawn in every update."""

    steps = 12
    evaluate_every = 5

    def __init__(self, seed: int, steps: int) -> None:
        self.map = torch.randn(4, 4)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 4))

    def batch(self, step: int) -> Any:
        return torch.randn(16, 4)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch) - batch @ self.map).square().mean()

    def evaluate(self, model: nn.Module) -> Any:
        points = torch.randn(64, 4)
        return {"validation_loss": self.loss(model, points).item(), "training": model.training}

    def fingerprint(self) -> Any:
        return self.map


class Remembering(Line):
    """Its batches depend on how many it gave."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__(seed, steps)
        self.calls = count()

    def batch(self, step: int) -> Any:
        return torch.full((2, 4), float(next(self.calls)))


class WithoutSteps(Line):
    steps = None  # type: ignore[assignment]


class WithoutEvaluation:
    def __init__(self, seed: int, steps: int) -> None: ...


class Failing(Line):
    """Each argument of its wrong ones is one method."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("no luck")


class NoModel(Line):
    def model(self) -> Any:
        return [1, 2]


class EmptyModel(Line):
    def model(self) -> nn.Module:
        return nn.ReLU()


class OddBatch(Line):
    def batch(self, step: int) -> Any:
        return [object()]


class NumberLoss(Line):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return 1.5


class WideLoss(Line):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(model(batch))


class DetachedLoss(Line):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.ones(())


class NumberEvaluation(Line):
    def evaluate(self, model: nn.Module) -> Any:
        return 1.0


class OtherEvaluation(Line):
    def evaluate(self, model: nn.Module) -> Any:
        return {"accuracy": 1.0}


class ReservedEvaluation(Line):
    def evaluate(self, model: nn.Module) -> Any:
        return {"validation_loss": 1.0, "loss": 2.0}


class WordEvaluation(Line):
    def evaluate(self, model: nn.Module) -> Any:
        return {"validation_loss": "low"}


class NoFingerprint(Line):
    def fingerprint(self) -> Any:
        return None


class ShortSchedule(Line):
    def multipliers(self) -> list[float]:
        return [1.0, 0.5]


class WrongNorm(Line):
    max_norm = -1.0


class WrongRate(Line):
    adamw_lr = "high"


class NoArguments(Line):
    def __init__(self) -> None: ...


class Descent(torch.optim.Optimizer):
    """Plain descent; keeps nothing."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **further: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.direction(parameter.grad))

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient


class Counting(Descent):
    """Its steps shrink with a count that is not in its state."""

    calls = 0

    def direction(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / self.calls


class Unrepeatable(Descent):
    """Its steps depend on a count of all its objects."""

    calls = count(1)

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient / next(Unrepeatable.calls)


class Noisy(Descent):
    """Draws from torch's own random numbers."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)


class Unsavable(Descent):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "function": lambda: None}


class OfModel(Descent):
    def __init__(self, model: nn.Module, lr: float = 0.1, adamw_lr: float = 0.0) -> None:
        assert isinstance(model, nn.Module)
        super().__init__(model.parameters(), lr)
        self.adamw_lr = adamw_lr


class OfNames(Descent):
    def __init__(self, named_parameters: list[tuple[str, Tensor]], lr: float = 0.1) -> None:
        self.names = [name for name, _ in named_parameters]
        super().__init__([parameter for _, parameter in named_parameters], lr)


class MatricesOnly(Descent):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        given = list(params)
        if any(parameter.ndim != 2 for parameter in given):
            raise ValueError("matrices only")
        super().__init__(given, lr)


class NoRate(Descent):
    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr)


class Refusing(Descent):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        raise RuntimeError("not these\nparameters")


class RateLess(Descent):
    def __init__(self, params: Iterable[Tensor], rate: float = 0.1) -> None:
        super().__init__(params, rate)


class Stumbling(Descent):
    def direction(self, gradient: Tensor) -> Tensor:
        raise IndexError("out of range")


class GroupsWithoutRates(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {})


class OwnMuon(Muon):
    """A method of our kind."""


NOT_A_CLASS = 5
