"""Every recipe on several ranks: shared out or sharded, it does what replicated work does."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, run
from tests.methods.table import CLOCK_RECIPES, CUT_RECIPES, RECIPES, biased_transformer, make

STEPS = 6  # more than an interval
BUILD = partial(biased_transformer, 0, torch.float64)
EVERY = [*RECIPES, *CUT_RECIPES, *CLOCK_RECIPES]


def recipe(index: int, model: nn.Module, work: str) -> MatrixOptimizer:
    name, settings = EVERY[index]
    # In turns however work is divided; by default layers take them only where it is shared.
    turns = {"stagger": True} if "stagger" in METHODS[name].recipe.settings else {}
    return make(name, model, **{**turns, **settings}, work=work)


def ways(place: Place, indices: list[int]) -> list[tuple[Weights, Weights, Weights]]:
    return [
        (
            run(place, "ddp", partial(recipe, index, work="replicated"), STEPS, BUILD),
            run(place, "ddp", partial(recipe, index, work="shared"), STEPS, BUILD),
            run(place, "fsdp", partial(recipe, index, work="shared"), STEPS, BUILD),
        )
        for index in indices
    ]


HALF = len(EVERY) // 2


@pytest.mark.parametrize(
    "indices", [list(range(HALF)), list(range(HALF, len(EVERY)))], ids=["first", "second"]
)
def test_shared_work_equals_replicated_work(indices: list[int], tmp_path: Path) -> None:
    """Two ranks' gradients are the same sums in DDP and in FSDP2, so the steps must be too."""
    answers = launch(2, ways, tmp_path, indices=indices)
    for position, index in enumerate(indices):
        replicated, shared, sharded = zip(*[answer[position] for answer in answers], strict=True)
        for found in (replicated, shared, sharded):
            assert_alike(list(found))
        assert distance(shared[0], replicated[0]) < 1e-9, EVERY[index]
        assert distance(sharded[0], replicated[0]) < 1e-9, EVERY[index]
