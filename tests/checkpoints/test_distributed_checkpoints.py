"""torch.distributed.checkpoint on one process without a process group.

It makes a new optimizer step with zero gradients and lr 0, and takes the state it then has for the
keys and shapes of every later state.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd

from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import (
    EVERY_RECIPE,
    assert_equal,
    biased_transformer,
    make,
    saved,
)
from tests.models import train, transformer
from tests.versions import ONE_PROCESS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


@EVERY_RECIPE
@FLAT
def test_set_state_dict_goes_on_bit_for_bit(
    method: str, settings: dict[str, Any], flat: bool
) -> None:
    """Into an optimizer that has never stepped."""
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)
    model = biased_transformer(0, torch.bfloat16)
    optimizer = make(method, model, **settings)
    train(model, optimizer, range(6))
    weights, state = saved(dsd.get_state_dict(model, optimizer, options=options))
    train(model, optimizer, range(6, 12))

    resumed = biased_transformer(9, torch.bfloat16)
    other = make(method, resumed, **settings)
    dsd.set_state_dict(
        resumed, other, model_state_dict=weights, optim_state_dict=state, options=options
    )
    train(resumed, other, range(6, 12))
    assert_equal(model, resumed)


@FLAT
@pytest.mark.parametrize("method", ["GoMuon", "KFAC", "SOAP", "Shampoo"])
def test_a_directory_is_loaded_through_a_new_optimizers_state(
    method: str, flat: bool, tmp_path: Path
) -> None:
    """dcp.load reads what the state it is given asks for, and no more."""
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)

    def states(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, Any]:
        return {
            "model": dsd.get_model_state_dict(model, options=options),
            "optimizer": dsd.get_optimizer_state_dict(model, optimizer, options=options),
        }

    model = biased_transformer(0, torch.float32)
    optimizer = make(method, model)
    train(model, optimizer, range(6))
    dcp.save(states(model, optimizer), checkpoint_id=tmp_path, **ONE_PROCESS)
    train(model, optimizer, range(6, 12))

    resumed = biased_transformer(9, torch.float32)
    other = make(method, resumed)
    loaded = states(resumed, other)
    dcp.load(loaded, checkpoint_id=tmp_path, **ONE_PROCESS)
    dsd.set_model_state_dict(resumed, loaded["model"], options=options)
    dsd.set_optimizer_state_dict(resumed, other, loaded["optimizer"], options=options)
    train(resumed, other, range(6, 12))
    assert_equal(model, resumed)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("int8", None, 'in a checkpoint of state_dtype="int8"'),
        ("int8", "bfloat16", 'in a checkpoint of state_dtype="int8"'),
        (None, "int8", "momentum_scales"),  # torch misses the key
    ],
)
def test_codes_are_never_taken_for_numbers(
    before: Any, after: Any, message: str, tmp_path: Path
) -> None:
    """dcp.load copies into the tensors it is given, whatever their dtype."""
    model = transformer(dtype=torch.float32, layers=1)
    optimizer = make("GoMuon", model, state_dtype=before)
    train(model, optimizer, range(2))
    state = {"optimizer": dsd.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path, **ONE_PROCESS)
    other = make("GoMuon", model, state_dtype=after)
    other.zero_grad()
    loaded = {"optimizer": dsd.get_optimizer_state_dict(model, other)}

    def load() -> None:
        dcp.load(loaded, checkpoint_id=tmp_path, **ONE_PROCESS)
        dsd.set_optimizer_state_dict(model, other, loaded["optimizer"])

    with pytest.raises((ValueError, RuntimeError, dcp.api.CheckpointException), match=message):
        load()


@EVERY_RECIPE
def test_asking_a_new_optimizer_for_its_state_changes_nothing(
    method: str, settings: dict[str, Any]
) -> None:
    """No step counted, no refresh missed; nor does loading what was asked for make a state."""
    model, twin = (transformer(layers=1, dtype=torch.float32) for _ in range(2))
    optimizer, other = make(method, model, **settings), make(method, twin, **settings)
    state = saved(dsd.get_optimizer_state_dict(twin, other))
    train(model, optimizer, range(6))
    train(twin, other, range(6))
    assert_equal(model, twin)

    third = transformer(layers=1, dtype=torch.float32)
    late = make(method, third, **settings)
    dsd.set_optimizer_state_dict(third, late, state)
    train(third, late, range(6))
    assert_equal(model, third)


def test_a_copy_of_a_new_optimizers_state_is_as_new() -> None:
    model = transformer(layers=1, dtype=torch.float32)
    optimizer = make("GoMuon", model)
    dsd.get_optimizer_state_dict(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(5))
    train(twin, other, range(5))
    assert_equal(model, twin)


def test_a_first_step_that_learns_is_no_creation() -> None:
    """A schedule that starts at 0 warms up momentum and geometry."""
    model = transformer(layers=1)
    optimizer = make("GoMuon", model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1))
    assert all(group["step"] == 1 for group in optimizer.param_groups)
    entries = optimizer.state[model.get_parameter("trunk.blocks.0.mlp.up.weight")]
    assert entries["updates"] == 1
    assert entries["momentum"].any()
    assert entries["left_map"].any()
