"""Constructor arguments that no check could even look at are named like any other wrong one."""

from typing import Any

import numpy as np
import pytest
import torch

from gomuon import GoMuon, LayerSpec, Muon
from tests.models import mlp


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "refresh_every", "alpha"])
def test_values_beyond_every_number_are_named(name: str) -> None:
    odd: list[Any] = [np.ones(2), torch.ones(1, device="meta"), object()]
    for value in (10**400, -(10**400), 10**5000, *odd):
        with pytest.raises(ValueError, match=f"{name} must be .*, got "):
            GoMuon(mlp(3, 4, 2), **{name: value})


@pytest.mark.parametrize("name", ["nonfinite", "shrinkage", "polar", "adamw"])
def test_arrays_are_no_choices(name: str) -> None:
    array: Any = np.array(["a", "b"])
    with pytest.raises(ValueError, match=f"{name} must be"):
        GoMuon(mlp(3, 4, 2), **{name: array})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routes": 0.5}, "routes must be a dict, a function or None, got 0.5"),
        ({"routes": {1: "adamw"}}, "routes must have names as keys, got 1"),
        ({"specs": 0.5}, "specs must be a dict or None, got 0.5"),
        ({"specs": {1: LayerSpec()}}, "specs must have names as keys, got 1"),
        ({"specs": {"*": 3}}, "specs must have a LayerSpec for '0.weight', got 3"),
    ],
)
def test_overrides_of_another_type_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GoMuon(mlp(3, 4, 2), **settings)


def test_what_holds_no_parameters_is_named() -> None:
    with pytest.raises(TypeError, match="params must be a model, parameters or parameter groups"):
        Muon(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a group must have 'params'"):
        Muon([{}])
