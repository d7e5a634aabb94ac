"""Layers whose weights their parents multiply with, without calling the layer."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.capture.borrowed import borrowed_layers
from gomuon.moments import Statistics

Forward = Callable[["Two", Tensor], Tensor]


class Two(nn.Module):
    """Two layers; the first one is called by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))

    def rest(self, hidden: Tensor) -> Tensor:
        y: Tensor = self.second(hidden.tanh())
        return y


def linear(self: Two, x: Tensor) -> Tensor:
    return self.rest(F.linear(x, self.first.weight, self.first.bias))


def matmul(self: Two, x: Tensor) -> Tensor:
    return self.rest((self.first.weight @ x.mT).mT + self.first.bias)


def keyword(self: Two, x: Tensor) -> Tensor:
    return self.rest(F.linear(input=x, weight=self.first.weight, bias=self.first.bias))


def nested(self: Two, x: Tensor) -> Tensor:
    def inside(one: Tensor) -> Tensor:
        return F.linear(one, self.first.weight, self.first.bias)

    return self.rest(torch.stack([inside(one) for one in x]))


def asked(self: Two, x: Tensor) -> Tensor:
    """As T5 does."""
    if isinstance(self.first.weight, Tensor) and x.dtype != self.first.weight.dtype:
        x = x.to(self.first.weight.dtype)
    return self.rest(self.first(x))


def checked(function: Forward) -> Forward:
    @functools.wraps(function)
    def call(self: Two, x: Tensor) -> Tensor:
        return function(self, x)

    return call


@checked
def decorated(self: Two, x: Tensor) -> Tensor:
    return linear(self, x) if x.ndim > 9 else self.by_method(x)  # type: ignore[operator]


def by_method(self: Two, x: Tensor) -> Tensor:
    return linear_of(self.first.weight, self.first.bias, x, self)


def linear_of(weight: Tensor, bias: Tensor, x: Tensor, model: Two) -> Tensor:
    return model.rest(F.linear(x, weight, bias))


def made(forward: Forward) -> Two:
    kind = type("Own", (Two,), {"forward": forward, "by_method": by_method})
    model: Two = kind()
    return model


def moments(model: Two, loss: Callable[[Any], Tensor]) -> tuple[dict[str, Statistics], int]:
    optimizer = GoMuon(model, routes={"*.weight": "matrix"}, rows=None)
    loss(model).backward()
    found = optimizer._capture.collect(ranks=1)[0]
    sums = {name: found[p] for name, p in model.named_parameters() if p in found}
    return sums, optimizer._capture.groups[0].functions.entered


def batch() -> Tensor:
    return torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1)).double()


def squares(model: Any) -> Tensor:
    loss: Tensor = model(batch()).square().sum()
    return loss


def assert_same(found: dict[str, Statistics], expected: dict[str, Statistics]) -> None:
    assert found.keys() == expected.keys() == {"first.weight", "second.weight"}
    for name, one in expected.items():
        for side in ("inputs", "gradients"):
            a, b = getattr(found[name], side), getattr(one, side)
            torch.testing.assert_close(a.total, b.total, rtol=1e-12, atol=1e-12)
            assert float(a.count) == float(b.count)
            assert float(a.uses) == float(b.uses)


@pytest.mark.filterwarnings("error::gomuon.GeometryWarning")
@pytest.mark.parametrize(
    "forward", [linear, matmul, keyword, nested, decorated, asked], ids=lambda f: f.__name__
)
def test_moments_are_those_of_a_called_layer(forward: Forward) -> None:
    model = made(forward)
    assert borrowed_layers(model) == {model.first}
    expected, never = moments(Two(), squares)
    found, entered = moments(model, squares)
    assert_same(found, expected)
    assert (never, entered) == (0, 1)


def test_a_layer_that_is_called_and_whose_weight_is_used() -> None:
    """Both count, each once."""

    def both(self: Two, x: Tensor) -> Tensor:
        one = F.linear(x[:1], self.first.weight, self.first.bias)
        return torch.cat([self.rest(one), self.rest(self.first(x[1:]))])

    def apart(model: Any) -> Tensor:
        return squares(lambda x: torch.cat([model(x[:1]), model(x[1:])]))

    assert_same(moments(made(both), squares)[0], moments(Two(), apart)[0])


def test_a_weight_that_is_only_described_is_not_watched() -> None:
    def describes(self: Two, x: Tensor) -> Tensor:
        return self.rest(self.first(x.to(self.first.weight.dtype, copy=True)))

    model = made(describes)
    assert not borrowed_layers(model)
    assert moments(model, squares)[1] == 0
    assert not borrowed_layers(nn.TransformerEncoderLayer(8, 2))
