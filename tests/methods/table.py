"""Every registered method with settings to test it with, and wrong values for every setting.

All of it derives from the registry, so a method that is added is tested. A method registered from
outside the package (`pytest -p module`) is tested too.
"""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon as gomuon  # registers the methods
from gomuon import settings as kinds
from gomuon.intervals import Adaptive, Rotated
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.settings import Kind
from tests.models import transformer

SHORT = 4  # steps: a clock that turns over within a test

# Options that carry state of their own or take another path. Other methods run at their defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "GoMuon": [
        {},
        {"input_decay": 0.9, "shrinkage": {"damping": 0.1}},
        {"alpha": (0.0, 0.25), "geometry_decay": True, "weight_decay": 0.1},
    ],
    "KFAC": [{"statistics_every": 3}],
    "Shampoo": [
        {"statistics_every": 3, "block_size": 10},
        {"graft": "adagrad", "factor_decay": 1.0},
        {"graft_by": "whole", "block_size": 10, "start": 1e-6},
        {"refresh_at": "last", "gradient_decay": 0.9, "bias_correction": True},
        {"graft": None, "factor_decay": 1.0, "start": 0.1, "ridge": 0.0, "momentum": 0.0},
    ],
    "MuonPlus": [{"normalise": "col_row"}],
    "MuonEq": [{"equilibrate": "row_col"}, {"equilibrate": "col"}],
    "Scion": [{}, {"constrained": False, "momentum": 0.9}],
    "AdaMuon": [{}, {"sign": False}],
    "Dion": [{}, {"rank_fraction": 0.5}],
    "Gluon": [{"measure_steps": SHORT}],
    # The published ε of 1e-15 makes what rounding leaves of a null space as long as the rest.
    "SOAPMuon": [{"eps": 1e-8}],
    "SINGD": [{"like_kfac": True, "normalise": True}],
    "QSD": [{"input_decay": 0.9, "scale": 10.0}],
}


def _short_clock(name: str) -> dict[str, Any]:
    return {"refresh_every": SHORT} if "refresh_every" in METHODS[name].recipe.settings else {}


RECIPES: list[tuple[str, dict[str, Any]]] = [
    (name, {**_short_clock(name), **options})
    for name in METHODS
    for options in OPTIONS.get(name, [{}])
]
# With long sides: block-diagonal and diagonal factors take paths of their own.
CUT_RECIPES: list[tuple[str, dict[str, Any]]] = [
    (name, {**_short_clock(name), **options})
    for name, options in (
        ("GoMuon", {"block_size": 7, "input_decay": 0.9}),
        ("GoMuon", {"block_size": 5, "max_side": 16, "long_sides": "diagonal"}),
        ("KFAC", {"block_size": 7}),
        ("KFACMuon", {"block_size": 7}),
        ("MatchedKFAC", {"block_size": 7}),
        ("NewtonMuon", {"block_size": 7}),
        ("SINGD", {"block_size": 7}),
        ("SINGD", {"max_side": 1, "long_sides": "diagonal"}),
        ("QSD", {"block_size": 5, "max_side": 16, "long_sides": "diagonal"}),
    )
]
# With other clocks.
CLOCK_RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {"refresh_every": Adaptive(0.97, most=8), "stagger": True}),
    ("GoMuon", {"refresh_every": SHORT, "statistics_every": 1}),
    ("SOAP", {"refresh_every": Rotated(0.1)}),
    ("Shampoo", {"refresh_every": Rotated(0.1, every=2), "block_size": 10}),
    ("KLSOAP", {"refresh_every": Rotated(0.1, every=2)}),
]
_ALL_RECIPES = [*RECIPES, *CUT_RECIPES, *CLOCK_RECIPES]
EVERY_RECIPE = pytest.mark.parametrize(
    ("method", "settings"),
    _ALL_RECIPES,
    ids=["-".join((name, *keys)) for name, keys in _ALL_RECIPES],
)
EVERY_METHOD = pytest.mark.parametrize("method", list(METHODS))


def make(method: str, model: nn.Module, **settings: Any) -> MatrixOptimizer:
    return METHODS[method](model, **settings)


def biased_transformer(seed: int, dtype: torch.dtype) -> nn.Module:
    """One layer has a bias, which K-FAC joins to its weight."""
    model = transformer(seed, dtype, layers=1)
    up = model.trunk.blocks[0].get_submodule("mlp.up")
    up.register_parameter(
        "bias", nn.Parameter(torch.zeros(up.get_parameter("weight").shape[0]).to(dtype))
    )
    return model


def saved(thing: Any) -> Any:
    """Through a file that may hold tensors and numbers only."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- wrong values -------------------------------------------------------------------------------

# Of kinds that are not choices; no kind takes the last of them.
_WRONG: list[tuple[Kind, list[Any]]] = [
    (kinds.NOT_NEGATIVE, [-0.1, float("nan"), float("inf")]),
    (kinds.POSITIVE, [0.0, -1.0]),
    (kinds.DECAY, [1.0, -0.1]),
    (kinds.SHARE, [1.5, -0.5]),
    (kinds.POSITIVE_SHARE, [0.0, 1.5]),
    (kinds.EXPONENT, [0.6, -0.1, (0.1, 0.2)]),
    (kinds.EXPONENTS, [0.6, -0.1, (0.1, 0.2, 0.3)]),
    (kinds.BETAS, [(0.9, 1.0), 0.9]),
    (kinds.INTERVAL, [0, 2.5, True]),
    (kinds.ADAPTIVE, [0, 2.5, True, {"least": 1}]),
    (kinds.ROTATED, [0, 2.5, True, {"threshold": 0.1}]),
    (kinds.WHOLE, [-1, 2.5]),
    (kinds.FLAG, [1, None]),
    (kinds.SHRINKAGE, [1.5, {"damping": -1.0}, {"ridge": 1.0}]),
    (kinds.POLAR, [None]),
]
NO_CHOICE = "no such choice"
COMMON: dict[str, list[Any]] = {
    "loss_reduction": ["none"],
    "nonfinite": ["ignore"],
    "work": ["divided"],
    "tensor_parallel": ["whole"],
    "process_group": ["world"],
    "adamw": [3e-3],
}


def wrong_values(method: str) -> dict[str, list[Any]]:
    """For every setting of a method, values that its kind must refuse."""
    return {
        name: [*_wrong(setting.kind), NO_CHOICE]
        for name, setting in METHODS[method].recipe.settings.items()
    }


def _wrong(kind: Kind) -> list[Any]:
    for known, values in _WRONG:
        if kind is known:
            return values
        if kind.expected == f"None or {known.expected}":
            return [value for value in values if value is not None]
    return []
