"""What every method promises also holds for state in fewer bits."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import EVERY_METHOD, EVERY_RECIPE, assert_equal, make, saved
from tests.methods.test_every_method import OddShapes, train_odd
from tests.models import train, transformer

WIDE = {"square", "momentum_scales", "step", "exp_avg", "exp_avg_sq"}


def new(
    method: str, form: str, seed: int, settings: dict[str, Any]
) -> tuple[nn.Module, MatrixOptimizer]:
    attends = method == "MuonQK"
    model: nn.Module = (
        transformer(seed, torch.float32, layers=1) if attends else OddShapes(seed, torch.float32)
    )
    return model, make(method, model, **settings, state_dtype=form)


@EVERY_RECIPE
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_resumes_bit_for_bit(method: str, settings: dict[str, Any], form: str) -> None:
    """After steps of every kind: the first, one that refreshes and one that reuses."""
    model, optimizer = new(method, form, 0, settings)
    files = {}
    for step in range(6):
        train_odd(model, optimizer, range(step, step + 1))
        if step in (0, 3, 5):
            files[step + 1] = saved((model.state_dict(), optimizer.state_dict()))
    twin, other = copy.deepcopy((model, optimizer))
    train_odd(model, optimizer, range(6, 10))
    train_odd(twin, other, range(6, 10))
    assert_equal(model, twin)
    for step, (weights, state) in files.items():
        resumed, fresh = new(method, form, 9, settings)
        resumed.load_state_dict(weights)
        fresh.load_state_dict(state)
        assert same_state(fresh.state_dict()["state"], state["state"])
        train_odd(resumed, fresh, range(step, 10))
        assert_equal(model, resumed)


# Nearly singular Gram matrices, averages of squares, and numbers of whole matrices.
WIDE_OF = {
    "Shampoo": {"left_factor", "right_factor"},
    "Mousse": {"left_factor", "right_factor"},
    "NorMuon": {"left_square"},
    "MuonHyperball": {"radius"},
    "Gluon": {"smoothness"},
    "SINGD": {"left_map", "right_map", "left_velocity", "right_velocity"},
}


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@EVERY_METHOD
def test_nothing_is_kept_wide_by_accident(method: str) -> None:
    model = transformer(dtype=torch.float32, layers=1)
    optimizer = make(method, model, state_dtype="bfloat16")
    losses = [train(model, optimizer, range(1))[0] for _ in range(12)]
    assert losses[-1] < losses[0]
    wide = {
        name
        for entries in optimizer.state.values()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16
    }
    assert wide - WIDE == WIDE_OF.get(method, set())
