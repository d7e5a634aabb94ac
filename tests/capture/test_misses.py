"""A layer whose maps are not renewed: one warning for each cause, with what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GeometryWarning, GoMuon
from gomuon.capture.misses import MISSED
from tests.models import mlp

Pass = Callable[[nn.Sequential, GoMuon], None]


def data() -> Tensor:
    return torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def usual(model: nn.Sequential, optimizer: GoMuon) -> None:
    model(data()).square().mean().backward()


def evaluating(model: nn.Sequential, optimizer: GoMuon) -> None:
    model.eval()
    usual(model, optimizer)


def functional(model: nn.Sequential, optimizer: GoMuon) -> None:
    """The second layer's weight is used without its module."""
    hidden = nn.functional.linear(model[:2](data()), model.get_parameter("2.weight"))
    model[3:](hidden).square().mean().backward()


def by_autograd(model: nn.Sequential, optimizer: GoMuon) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(data()).square().mean(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def without_gradients(model: nn.Sequential, optimizer: GoMuon) -> None:
    with torch.no_grad():
        model(data())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def frozen(model: nn.Sequential, optimizer: GoMuon) -> None:
    usual(model, optimizer)
    optimizer._capture.forget_sums()
    model.get_parameter("0.weight").requires_grad_(False)
    usual(model, optimizer)


def said(*passes: Pass, **settings: Any) -> list[str]:
    model = mlp(3, 4, 4, 2)
    optimizer = GoMuon(model, refresh_every=2, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one in passes:
            model.requires_grad_(True).train()
            optimizer.zero_grad()
            one(model, optimizer)
            optimizer.step()
    return [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]


# Steps 0, 2, 4, … refresh.
@pytest.mark.parametrize(
    ("missing", "names", "words"),
    [
        (functional, ["'2.weight'"], "its module was not called since the last step"),
        (by_autograd, ["'0.weight'", "'2.weight'"], "Call loss.backward()"),
        (without_gradients, ["'0.weight'", "'2.weight'"], "were without gradients (no_grad"),
    ],
)
def test_each_cause_is_said_once(missing: Pass, names: list[str], words: str) -> None:
    (never,) = said(*[missing] * 12)
    assert words in never
    assert "It uses identity maps, like Muon" in never
    assert never.startswith(f"nothing was captured for {', '.join(names)}: ")
    first, others = [usual] * 2, [missing] * (2 * MISSED)
    assert said(*first, *others[:-2]) == []  # fewer misses than this may be chance
    (late,) = said(*first, *others, *others)
    assert words in late
    assert "Its maps stay as they are" in late
    assert late.startswith(f"nothing was captured for {', '.join(names)} in {MISSED} refreshes: ")
    assert said(*first, *others[:-2], usual, usual, *others[:-2]) == []  # counted in a row


def test_different_causes_are_said_apart() -> None:
    told = said(by_autograd, by_autograd, functional, functional)
    assert [words.startswith("nothing was captured for '2.weight': its") for words in told] == [
        False,  # both layers
        True,  # the first one has maps by now
    ]
    told = said(usual, usual, *[functional] * (2 * MISSED), *[usual] * 2, *[by_autograd] * 8)
    assert len(told) == 2
    assert "was not called" in told[0]
    assert "Call loss.backward()" in told[1]


def test_evaluation_mode_is_no_cause() -> None:
    assert said(*[evaluating] * 12) == []


def test_a_frozen_weight_with_an_old_gradient() -> None:
    told = said(usual, usual, *[frozen] * (2 * MISSED))
    assert len(told) == 1
    assert "its weight has requires_grad=False, and a gradient from before" in told[0]


def test_an_expert_without_rows_is_no_cause() -> None:
    """Its gradient may be there as zeros."""

    def zeros(model: nn.Sequential, optimizer: GoMuon) -> None:
        model[:2](data()).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    assert said(usual, usual, *[zeros] * 12) == []
