"""Our methods as torch's own tests describe optimizers: `OptimizerInfo` entries, as data."""

import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.models import language_loss, mlp, transformer


def _helpers() -> Any:
    """torch.testing._internal.common_optimizers, without what importing it does to the process."""
    name, stand_in = "expecttest", types.ModuleType("expecttest")
    # torch derives its TestCase from this package's, which is no dependency of torch.
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    added = sys.modules.setdefault(name, stand_in) is stand_in
    flag = "__allow_nonbracketed_mutation_flag"  # the import forbids setting backend flags
    allowed = getattr(torch.backends, flag)
    try:
        return importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        setattr(torch.backends, flag, allowed)
        if added:
            del sys.modules[name]


helpers = _helpers()

# Settings that came after the first release, so to speak: checkpoints without them must load.
NEWEST = (
    "input_decay", "geometry_decay", "token_stride", "token_skip", "reduce", "rows",
    "statistics_every", "graft", "aspect", "polar",
)  # fmt: skip
TORCH_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize")


def _inputs(method: type[MatrixOptimizer]) -> Callable[..., list[Any]]:
    known = method.recipe.defaults
    table: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        ("lr", {"lr": 0.01}),
        ("tensor lr", {"lr": torch.tensor(0.01)}),
        ("weight decay", {"weight_decay": 0.1}),
        ("momentum", {"momentum": 0.5, "nesterov": False}),
        ("betas", {"betas": (0.8, 0.9)}),
        ("short clock", {"refresh_every": 2}),
        ("adamw", {"adamw": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}}),
    ]

    def inputs(device: Any, dtype: Any = None) -> list[Any]:
        return [
            helpers.OptimizerInput(params=None, kwargs=dict(kwargs), desc=desc)
            for desc, kwargs in table
            if all(name in known or name == "adamw" for name in kwargs)
        ]

    return inputs


def _error(
    desc: str, error: type[Exception], message: str, kwargs: Any = None, params: Any = None
) -> Any:
    step = desc.startswith("at the step")
    moment = helpers.OptimizerErrorEnum
    return helpers.ErrorOptimizerInput(
        helpers.OptimizerInput(params=params, kwargs=kwargs or {}, desc=desc),
        error_on=moment.STEP_ERROR if step else moment.CONSTRUCTION_ERROR,
        error_type=error,
        error_regex=message,
    )


def _with_gradient(gradient: Tensor) -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient
    return [parameter]


def _decay_error(method: type[MatrixOptimizer]) -> Any:
    """A hyperball has no decay: its weights keep their norm."""
    known = "weight_decay" in method.recipe.defaults
    kind, message = (ValueError, "must be") if known else (TypeError, "has no setting")
    return _error("decay", kind, message, {"weight_decay": -1.0})


def _errors(method: type[MatrixOptimizer]) -> Callable[..., list[Any]]:
    def errors(device: Any, dtype: Any) -> list[Any]:
        every = helpers.get_error_inputs_for_all_optims(device, dtype)
        for error in every:
            if "Tensor lr" in error.optimizer_error_input.desc:
                error.error_regex = "lr must be a finite number"  # said as for every other value
        sparse = torch.eye(2).to_sparse()
        return [
            *every,
            _error("nothing", ValueError, "empty parameter list", params=[]),
            _error("lr", ValueError, "lr must be", {"lr": -1.0}),
            _decay_error(method),
            _error(
                "complex", ValueError, "complex64", params=[nn.Parameter(torch.ones(2, 2) * 1j)]
            ),
            _error("at the step: sparse", ValueError, "sparse", params=_with_gradient(sparse)),
            _error(
                "at the step: NaN",
                gomuon.NonFiniteGradientError,
                "NaN or infinity",
                params=_with_gradient(torch.full((2, 2), float("nan"))),
            ),
            *(
                _error(flag, TypeError, f"no setting '{flag}'", {flag: True})
                for flag in TORCH_FLAGS
            ),
        ]

    return errors


INFOS: dict[str, Any] = {
    name: helpers.OptimizerInfo(
        method,
        optim_inputs_func=_inputs(method),
        optim_error_inputs_func=_errors(method),
        supported_impls=(),
        not_og_supported_flags=tuple(flag for flag in NEWEST if flag in method.recipe.defaults),
        supports_complex=False,
    )
    for name, method in METHODS.items()
}


@dataclass
class Problem:
    """An optimizer with something to learn, made from a model or from its bare parameters."""

    model: nn.Module
    optimizer: MatrixOptimizer
    attends: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self) -> Tensor:
        """Gradients of one fixed batch; returns the loss."""
        self.optimizer.zero_grad()
        if self.attends:
            loss = language_loss(self.model, 0)
        else:
            x = torch.linspace(-1, 1, 60).reshape(10, 6).sin()
            loss = (self.model(x) - x[:, :3].cos()).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.backward().item())
            self.optimizer.step()
        return losses

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]


def problem(info: Any, bare: bool = False, named: bool = False, **kwargs: Any) -> Problem:
    """The same start every time; queries and keys where a method needs them.

    Bare parameters come with their names or without.
    """
    attends = info.name == "MuonQK"
    model: nn.Module
    if attends:
        model = transformer(layers=1, dtype=torch.float32)
    else:
        model = mlp(6, 6, 6, 3, dtype=torch.float32)
    parameters = model.named_parameters() if named else model.parameters()
    return Problem(model, info.optim_cls(parameters if bare else model, **kwargs), attends)


def problems(info: Any, bare: bool) -> Iterator[Problem]:
    """One for every input of the entry."""
    for given in info.optim_inputs_func(device="cpu"):
        yield problem(info, bare, **given.kwargs)


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


EVERY_METHOD = pytest.mark.parametrize("info", INFOS.values(), ids=INFOS.keys())
WAYS = [
    pytest.param(info, bare, id=f"{name}-{'bare' if bare else 'model'}")
    for name, info in INFOS.items()
    for bare in (False, True)
    if not (bare and name == "MuonQK")  # it refuses bare parameters: see the error inputs
]
EVERY_WAY = pytest.mark.parametrize(("info", "bare"), WAYS)
