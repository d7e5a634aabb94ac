"""Weights that functions multiply with share the moment of an input that they all read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon
from gomuon.functional import factors
from gomuon.moments import Statistics

WIDTH = 6


class Projections(nn.Module):
    """Three projections of one input, as layers or as weights of functions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.how = how
        for name in ("q", "k", "v"):
            weight = torch.randn(4, WIDTH, generator=generator).double()
            if how == "layers":
                layer = nn.Linear(WIDTH, 4, bias=False).double()
                layer.weight = nn.Parameter(weight)
                setattr(self, name, layer)
            else:
                self.register_parameter(name, nn.Parameter(weight))

    def times(self, name: str, x: Tensor) -> Tensor:
        one = getattr(self, name)
        made: Tensor = one(x) if isinstance(one, nn.Linear) else F.linear(x, one)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.times("q", x) * self.times("k", x).sin() + self.times("v", x)


class Model(nn.Module):
    def __init__(self, how: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.body: Callable[[Model, Tensor], Tensor] | None = None
        self.first, self.second = Projections(how), Projections(how)
        self.back = nn.Linear(4, WIDTH, bias=False).double()
        with torch.no_grad():
            self.back.weight.copy_(torch.eye(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.body is not None:
            return self.body(self, x)
        if self.checkpointed:
            x = self.back(checkpoint(self.first, x, use_reentrant=False))
            out: Tensor = checkpoint(self.second, x, use_reentrant=False)
            return out
        last: Tensor = self.second(self.back(self.first(x)))
        return last


def optimizer_of(model: nn.Module, **settings: Any) -> GoMuon:
    return GoMuon(model, routes={"*": "matrix"}, stagger=False, **settings)


def inputs(step: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def captured(
    model: nn.Module, run: Callable[[nn.Module], None]
) -> tuple[dict[str, Statistics], GoMuon]:
    optimizer = optimizer_of(model)
    run(model)
    found = optimizer._capture.collect(ranks=1)[0]
    names: dict[Tensor, str] = {
        p: name.removesuffix(".weight") for name, p in model.named_parameters()
    }
    return {names[p]: statistics for p, statistics in found.items()}, optimizer


def backward(model: nn.Module) -> None:
    model(inputs()).square().sum().backward()


def test_one_moment_serves_all() -> None:
    found, _ = captured(Model("functions"), backward)
    shared = found["first.q"].inputs
    assert shared is not None
    assert found["first.k"].inputs is shared
    assert found["first.v"].inputs is shared
    assert found["second.q"].inputs is not shared
    rows = inputs().flatten(0, 1)
    torch.testing.assert_close(shared.total, rows.mT @ rows)
    assert shared.total.shape == (WIDTH, WIDTH)
    assert float(shared.count) == float(shared.uses) == len(rows)


def one_micro_batch(model: nn.Module) -> None:
    backward(model)


def two_micro_batches(model: nn.Module) -> None:
    for part in inputs().split(3):
        model(part).square().sum().backward()


def a_part_of_the_loss(model: Model, x: Tensor) -> Tensor:
    """The backward pass reaches only one of the readers."""
    model.first.times("k", x)
    return model.first.times("q", x).sin() + model.second(x + 1)


def input_written_between(model: Model, x: Tensor) -> Tensor:
    """The same tensor, but not the same input."""
    own = x.clone()
    with torch.no_grad():
        first = model.first.times("q", own)
    own.mul_(2.0)
    second = model.first.times("k", own.clone()) + model.first.times("v", own.clone())
    return first + second + model.second(x)


def used_twice(model: Model, x: Tensor) -> Tensor:
    total = sum(model.first.times(name, x).sin() for name in ("q", "k", "k", "v"))
    assert isinstance(total, Tensor)
    return total + model.second(x)


def fewer_rows(model: Model, x: Tensor) -> Tensor:
    part = x[:2]
    inner = model.first.times("q", part) + model.first.times("k", part)
    return torch.cat([inner, model.first.times("v", x)]).sum(0) + model.second(x)


def gradients_of_something_else_first(model: nn.Module) -> None:
    assert isinstance(model, Model)
    y = model(inputs())
    torch.autograd.grad(y.sum(), model.back.weight, retain_graph=True)
    y.square().sum().backward()


RUNS = (one_micro_batch, two_micro_batches, gradients_of_something_else_first)
BODIES = (a_part_of_the_loss, input_written_between, used_twice, fewer_rows)


def with_body(body: Callable[[Model, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        assert isinstance(model, Model)
        model.body = body
        backward(model)

    return run


@pytest.mark.parametrize(
    "run",
    [*RUNS, *map(with_body, BODIES)],
    ids=[function.__name__ for function in (*RUNS, *BODIES)],
)
def test_moments_are_those_of_layers(run: Callable[[nn.Module], None]) -> None:
    found, _ = captured(Model("functions"), run)
    expected, _ = captured(Model("layers"), run)
    assert found.keys() == expected.keys()
    for name, statistics in found.items():
        for side in ("inputs", "gradients"):
            one, other = getattr(statistics, side), getattr(expected[name], side)
            assert (one is None) == (other is None), (name, side)
            if one is not None:
                torch.testing.assert_close(one.total, other.total, msg=f"{name} {side}")
                assert torch.equal(one.count, other.count)
                assert torch.equal(one.uses, other.uses)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("alpha", [0.25, (0.0, 0.25)])
def test_training_is_that_of_layers(checkpointed: bool, alpha: Any) -> None:
    """Over several refreshes, with micro-batches; a run of its own is saved and resumed."""
    models = [Model(how, checkpointed) for how in ("layers", "functions")]
    optimizers = [optimizer_of(model, refresh_every=2, alpha=alpha) for model in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            for part in inputs(step).split(3):
                model(part).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_one_root_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many factors are decomposed as with layers."""
    counted: dict[str, int] = {}
    real = factors.decompose

    for how in ("layers", "functions"):
        made = [0]

        def decompose(routine: Any, S: Tensor, made: list[int] = made) -> Any:
            made[0] += S.shape[:-2].numel()
            return real(routine, S)

        monkeypatch.setattr(factors, "decompose", decompose)
        model = Model(how)
        optimizer = optimizer_of(model, roots="eigh")
        backward(model)
        optimizer.step()
        counted[how] = made[0]
    # Seven of output gradients; of inputs one for each group of projections and one for `back`.
    assert counted == {"layers": 10, "functions": 10}


def test_nothing_is_kept_between_steps() -> None:
    model = Model("functions")
    optimizer = optimizer_of(model, refresh_every=1)
    for step in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        shared = optimizer._capture.groups[0].shared
        assert not shared._reached, step
        assert not any(len(inputs) for inputs in shared._inputs_by_leader.values()), step
