"""The clock `Rotated` on several ranks: it is decided by state alone, so nothing is sent."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gomuon import Rotated
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import assert_alike, distance, train, weights, wrapped
from tests.models import transformer

STEPS = 6
METHODS_TRIED = ("SOAP", "Shampoo")
WORK = ("shared", "replicated")


def make(method: str, model: nn.Module, work: str) -> MatrixOptimizer:
    # A larger ridge: what rounding makes of a null space is not to be compared.
    settings: dict[str, Any] = {"ridge": 1e-2} if method == "Shampoo" else {"eps": 1e-3}
    return METHODS[method](model, lr=1e-3, refresh_every=Rotated(0.1), work=work, **settings)


def trained(place: Place | None, kind: str, method: str, work: str) -> dict[str, Any]:
    model = wrapped(transformer(layers=1), kind)
    optimizer = make(method, model, work)
    train(model, optimizer, range(STEPS), place)
    return {"weights": weights(model)}


def all_cases(place: Place) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, work): trained(place, "ddp", method, work)
        for method in METHODS_TRIED
        for work in WORK
    }


@pytest.mark.filterwarnings("ignore:state_dict")
def test_owners_decide_as_replicas_do_and_two_ranks_as_one(tmp_path: Path) -> None:
    answers = launch(2, all_cases, tmp_path)
    for method in METHODS_TRIED:
        shared, replicated = (
            [answer[method, work]["weights"] for answer in answers] for work in WORK
        )
        assert_alike(shared)
        assert_alike(replicated)
        assert distance(shared[0], replicated[0]) < 1e-9, method
    # SOAP's first basis of a null space is made of rounding errors, which two ranks have others of.
    alone = trained(None, "alone", "Shampoo", "alone")["weights"]
    assert distance(answers[0]["Shampoo", "shared"]["weights"], alone) < 1e-8
