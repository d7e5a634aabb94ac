"""Weights that functions multiply with, where torch.compile runs: seen in eager parts only."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GeometryWarning, GoMuon


class Parts(nn.Module):
    """A layer, and a product outside of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(F.linear(x, self.weight).tanh()).tanh())


class Outer(nn.Module):
    """An eager model with a compiled part, and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Parts()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        # Not the backend "eager": it runs a graph's functions one by one, where they are seen.
        self.compiled = torch.compile(self.part, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(F.linear(x, self.weight).tanh())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(model: nn.Module, run: nn.Module, count: int = 5) -> tuple[GoMuon, list[str]]:
    optimizer = GoMuon(model, routes={"*weight": "matrix"}, refresh_every=2, stagger=False)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for step in range(count):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
    return optimizer, [str(w.message) for w in given if w.category is GeometryWarning]


def test_a_compiled_model_trains_and_says_what_was_not_seen() -> None:
    model = Parts()
    optimizer, messages = steps(model, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert len(messages) == 1
    assert "nothing was captured for 'weight'" in messages[0]
    assert "only in a graph of torch.compile" in messages[0]
    assert "left_map" in optimizer.state[model.layer.weight]
    assert "left_map" not in optimizer.state[model.weight]


class Several(nn.Module):
    """Two products outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight).tanh()
        return self.head(x)


def test_one_cause_is_one_message_that_names_all_weights_and_what_to_do() -> None:
    model = Several()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        optimizer = GoMuon(model, routes={"weights.*": "matrix"}, refresh_every=2)
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    told = [str(w.message) for w in given if w.category is GeometryWarning]
    assert len(told) == 1
    assert told[0].startswith("nothing was captured for 'weights.0', 'weights.1': functions mult")
    assert "leave it out of what is compiled" in told[0]


def test_products_in_the_eager_part_of_a_model_are_captured_and_others_named() -> None:
    """The eager model enters the mode, and torch.compile runs a graph inside of it."""
    model = Outer()
    optimizer, messages = steps(model, model)
    assert len(messages) == 1
    assert "captured for 'part.weight'" in messages[0]
    assert "a graph of torch.compile; leave it out of what is compiled" in messages[0]
    assert "left_map" not in optimizer.state[model.part.weight]
    for layer in (model.part.layer.weight, model.weight):
        assert "left_map" in optimizer.state[layer]


def test_the_products_outside_of_the_graph_are_those_of_the_eager_model() -> None:
    model, eager = Outer(), Outer()
    eager.weight.data.copy_(model.weight.data)
    eager.compiled = eager.part
    found = []
    for one in (model, eager):
        optimizer, _ = steps(one, one, count=1)
        found.append([optimizer.state[one.weight][key] for key in ("left_factor", "right_map")])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)
