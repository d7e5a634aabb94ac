"""A checkpoint that an older version wrote loads, and training continues as it did there.

Where that is not possible, a warning or an error says so.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gomuon
from gomuon.optimizer import MatrixOptimizer
from tests.checkpoints.older_versions import SAVED_AT, STEPS, learn, read, settings, small_model

# Written by version 0.1.0, before the library was divided into rooms: see older_versions.py.
SAVED = read(Path(__file__).parent / "version_0_1_0.pt.gz")
RENAMED = {"KFACMuon": "MatchedKFAC"}  # by its present name
CHANGED = {"MuonSquared"}  # computes something else now


def resumable(saved_as: str, method: str) -> tuple[nn.Module, MatrixOptimizer]:
    """The saved model with a new optimizer of a method."""
    model = small_model()
    model.load_state_dict(SAVED[saved_as]["model"])
    return model, getattr(gomuon, method)(model, **settings(method))


@pytest.mark.parametrize("saved_as", [name for name in SAVED if name not in CHANGED])
def test_an_older_checkpoint_loads_and_continues(saved_as: str) -> None:
    saved = SAVED[saved_as]
    model, optimizer = resumable(saved_as, RENAMED.get(saved_as, saved_as))
    optimizer.load_state_dict(saved["optimizer"])
    learn(model, optimizer, range(SAVED_AT, STEPS))
    for name, value in model.state_dict().items():
        # Other processors round differently, and SOAP's and Mousse's steps enlarge rounding.
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-6, atol=1e-8, msg=name)


def test_newton_muon_keeps_its_former_clock() -> None:
    """It refreshed at updates 1, K + 1, …, and had no setting for that."""
    _, optimizer = resumable("NewtonMuon", "NewtonMuon")
    assert {group["refresh_at"] for group in optimizer.param_groups} == {"last"}
    optimizer.load_state_dict(SAVED["NewtonMuon"]["optimizer"])
    assert {group["refresh_at"] for group in optimizer.param_groups} == {"first"}


@pytest.mark.parametrize("named", [True, False])
def test_a_renamed_methods_checkpoint_is_refused_under_its_former_name(named: bool) -> None:
    """Also by torch.distributed.checkpoint, which does not save the method."""
    saved: dict[str, Any] = SAVED["KFACMuon"]["optimizer"]
    _, optimizer = resumable("KFACMuon", "KFACMuon")
    words = "whose KFACMuon is MatchedKFAC now; load it with MatchedKFAC"
    with pytest.raises(ValueError, match=re.escape(words)):
        optimizer.load_state_dict(saved if named else {**saved, "method": None})
    assert not optimizer.state
    _, other = resumable("KFACMuon", "Muon")
    with pytest.raises(ValueError, match="a checkpoint of MatchedKFAC, but the optimizer is Muon"):
        other.load_state_dict(saved)


def test_a_checkpoint_of_the_present_method_of_that_name_is_its_own() -> None:
    model, optimizer = resumable("KFACMuon", "KFACMuon")
    learn(model, optimizer, range(2))
    _, loaded = resumable("KFACMuon", "KFACMuon")
    loaded.load_state_dict(optimizer.state_dict())
    _, other = resumable("KFACMuon", "MatchedKFAC")
    with pytest.raises(ValueError, match="a checkpoint of KFACMuon, but the optimizer is Matched"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("method", sorted(CHANGED))
def test_what_is_computed_otherwise_now_loads_with_a_warning(method: str) -> None:
    saved = SAVED[method]
    model, optimizer = resumable(method, method)
    with pytest.warns(gomuon.GeometryWarning, match=f"of an older {method}: .* train with the ver"):
        optimizer.load_state_dict(saved["optimizer"])
    learn(model, optimizer, range(SAVED_AT, STEPS))
    values = model.state_dict()
    assert all(bool(value.isfinite().all()) for value in values.values())
    assert not all(torch.allclose(values[name], saved["after"][name]) for name in values)


@pytest.mark.filterwarnings("error::gomuon.GeometryWarning")
@pytest.mark.parametrize("method", sorted(CHANGED))
def test_its_own_checkpoints_load_without_a_word(method: str) -> None:
    model, optimizer = resumable(method, method)
    learn(model, optimizer, range(2))
    _, loaded = resumable(method, method)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
