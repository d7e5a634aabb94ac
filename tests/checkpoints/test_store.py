"""The store on its own, without an optimizer: what is saved, what fits, and how it comes back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Muon
from gomuon.checkpoints.store import FORMAT, Store
from gomuon.parameters.layout import Layout
from gomuon.parameters.state import Cut


def groups(weight: Tensor) -> list[dict[str, Any]]:
    adamw = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    common = {"treatment": "matrix", "step": 2, "nonfinite": "raise", "adamw": adamw}
    return [{"params": [weight], "param_names": ["weight"], **Muon.recipe.defaults, **common}]


def checkpoint(weight: Tensor, momentum: Tensor) -> dict[str, Any]:
    packed = [{**group, "params": [0]} for group in groups(weight)]
    return {"state": {0: {"updates": 2, "momentum": momentum}}, "param_groups": packed}


def cut_of(parameter: Tensor, group: Any) -> Cut:
    return Layout().cut_of(parameter, group, known=True)


def test_a_state_comes_back_in_the_precision_it_was_saved_in() -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    momentum = torch.full((3, 4), 1.2345678)  # bfloat16 would round it
    store = Store(Muon.recipe)
    saved = store.saved(checkpoint(weight, momentum))
    assert (saved["format"], saved["method"]) == (FORMAT, "Muon")
    fitted = store.fitted(groups(weight), saved, cut_of)
    (entries,) = store.restored(groups(weight), fitted).values()
    assert torch.equal(entries["momentum"], momentum)
    assert entries["momentum"] is not momentum, "the step writes into it"
    assert entries["updates"] == 2


def test_what_does_not_fit_is_refused_and_stays_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    wrong = checkpoint(weight, torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"momentum of 'weight' has shape \(4, 4\)"):
        Store(Muon.recipe).fitted(groups(weight), wrong, cut_of)
    assert wrong["state"][0]["momentum"].shape == (4, 4)
    with pytest.raises(ValueError, match="a checkpoint of Muon"):
        Store(GoMuon.recipe).fitted(groups(weight), {**wrong, "method": "Muon"}, cut_of)


def test_every_entry_a_method_keeps_is_in_its_table() -> None:
    from gomuon.methods.soap import RotatingBasis

    table = Store(GoMuon.recipe).entries
    assert {"momentum", "updates", "left_factor", "left_map", "right_map"} <= table.keys()
    assert "left_basis" not in Store(Muon.recipe).entries
    assert RotatingBasis.entries.keys() == {
        f"{side}_{kind}" for side in ("left", "right") for kind in ("factor", "basis")
    }
