"""Clocks that adapt on several ranks: hooks open alike, and two ranks are one with the union."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gomuon import Adaptive, GoMuon
from gomuon.parameters.state import INTERVAL
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import assert_alike, distance, train, weights, wrapped
from tests.models import transformer

EVERY = Adaptive(0.97, least=1, most=8)
STEPS = 10
CASES = (("ddp", "shared"), ("fsdp", "shared"), ("ddp", "replicated"))


def make(model: nn.Module, work: str, *, stagger: bool) -> GoMuon:
    return GoMuon(model, lr=0.03, refresh_every=EVERY, work=work, stagger=stagger)


def intervals(model: nn.Module, optimizer: GoMuon) -> dict[str, int]:
    return {
        name.removeprefix("module."): optimizer.state[p][INTERVAL]
        for name, p in model.named_parameters()
        if INTERVAL in optimizer.state.get(p, {})
    }


def trained(place: Place | None, kind: str, work: str, stagger: bool) -> dict[str, Any]:
    model = wrapped(transformer(), kind)
    optimizer = make(model, work, stagger=stagger)
    train(model, optimizer, range(STEPS), place)
    found: dict[str, Any] = {"weights": weights(model), "intervals": intervals(model, optimizer)}
    if work == "shared":
        found["owners"] = len(set(optimizer.owners().values()))
        found["whole"] = optimizer.consolidated_state_dict()
        # Parts of the state say when every layer refreshes, also those of other owners.
        saved = optimizer.state_dict()["state"]
        found["own part"] = sum(INTERVAL in entries for entries in saved.values())
    return found


def all_cases(place: Place) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {
        (*case, turns): trained(place, *case, turns) for case in CASES for turns in (False, True)
    }


@pytest.mark.filterwarnings("ignore:state_dict")
def test_two_ranks_are_one_and_their_checkpoint_goes_on_alone(tmp_path: Path) -> None:
    answers = launch(2, all_cases, tmp_path)
    for turns in (False, True):
        alone = trained(None, "alone", "alone", turns)
        assert len(set(alone["intervals"].values())) > 1, "nothing was tested"
        for case in CASES:
            found = [answer[(*case, turns)] for answer in answers]
            assert [one["intervals"] for one in found] == [alone["intervals"]] * 2, case
            assert_alike([one["weights"] for one in found])
            assert distance(found[0]["weights"], alone["weights"]) < 1e-9, case
            if "whole" in found[0]:
                assert found[0]["owners"] == 2
                assert found[0]["own part"] == len(alone["intervals"])

    # One process goes on with the whole state as the ranks would.
    whole = answers[0]["ddp", "shared", True]
    models = [transformer(seed=seed) for seed in (1, 0)]
    models[0].load_state_dict(whole["weights"])
    resumed = make(models[0], "alone", stagger=True)
    resumed.load_state_dict(whole["whole"])
    train(models[0], resumed, range(STEPS, STEPS + 4))
    straight = make(models[1], "alone", stagger=True)
    train(models[1], straight, range(STEPS + 4))
    assert intervals(models[0], resumed) == intervals(models[1], straight)
    assert distance(weights(models[0]), weights(models[1])) < 1e-8
