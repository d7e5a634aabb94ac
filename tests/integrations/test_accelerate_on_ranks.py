"""Accelerate's save_state on two ranks, as docs/integrations.md says to use it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.errors import GeometryWarning
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, weights
from tests.integrations.ranks import as_torchrun_does
from tests.models import mlp

accelerate = pytest.importorskip(
    "accelerate",
    reason="in the test extra: pip install '.[test]'",
    exc_type=ModuleNotFoundError,  # missing is a reason to skip, broken is not
)

STEPS, SAVED_AT = 7, 3


class Loop:
    """A loop of the user's own."""

    def __init__(self, place: Place | None, seed: int = 0) -> None:
        self.place = place
        self.accelerator = accelerate.Accelerator(cpu=True)
        model = mlp(6, 12, 12, 3, seed=seed)
        # In turns also in one process, which is compared with the ranks.
        optimizer = GoMuon(model, lr=0.05, adamw={"lr": 0.01}, stagger=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())

    def train(self, steps: range) -> "Loop":
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
            mine = x if self.place is None else x.chunk(self.place.size)[self.place.rank]
            loss = F.cross_entropy(self.model(mine), (mine[:, 0] > 0).long())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def whole_and_resumed(place: Place, target: Path) -> tuple[Weights, Weights]:
    as_torchrun_does(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        whole = Loop(place).train(range(SAVED_AT))
        whole.accelerator.save_state(str(target))
        whole.train(range(SAVED_AT, STEPS))
        resumed: Any = Loop(place, seed=9)
        resumed.accelerator.load_state(str(target))
        resumed.train(range(SAVED_AT, STEPS))
    return weights(whole.model), weights(resumed.model)


def test_a_saved_state_of_two_ranks_is_loaded_by_two_and_by_one(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    answers = launch(2, whole_and_resumed, tmp_path, target=target)
    for whole, resumed in answers:
        assert_alike([answers[0][0], whole, resumed])
    one = Loop(None, seed=9)
    one.accelerator.load_state(str(target))
    one.train(range(SAVED_AT, STEPS))
    assert distance(weights(one.model), answers[0][0]) < 1e-9
