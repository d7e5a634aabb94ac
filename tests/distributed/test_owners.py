"""Shared work is less work: counted in FLOPs, and timed as a ratio within one run."""

import time
from pathlib import Path

import torch
from torch import nn

from gomuon import GoMuon
from gomuon.lab.experiments.models import CharacterModel
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.work import Decomposition
from tests.counting import counted
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import language_loss, wrapped
from tests.models import SYMBOLS, tokens

INTERVAL, MEASURED = 4, 3
WAYS = ("shared", "replicated")


def model() -> nn.Module:
    """Wide enough that matrices, not messages, are the work."""
    return CharacterModel(SYMBOLS, width=192, layers=2, heads=4, hidden=576).double()


def backward(model: nn.Module, optimizer: MatrixOptimizer, step: int) -> None:
    window = tokens(step)
    optimizer.zero_grad()
    language_loss(model, window, window[:, 1:].numel(), 1).backward()


def flops_of(optimizer: MatrixOptimizer) -> int:
    """Of products and, by the textbook, of decompositions."""
    products, calls = counted(optimizer.step)
    return products + sum(
        Decomposition(count, routine, m, n).flops for (routine, m, n), count in calls.items()
    )


def costs(place: Place) -> dict[str, tuple[float, int]]:
    """Seconds and FLOPs of this rank's steps over whole intervals, either way in turn."""
    models = {work: wrapped(model(), "ddp") for work in WAYS}
    optimizers = {
        work: GoMuon(model, refresh_every=INTERVAL, work=work, stagger=True, block_size=None)
        for work, model in models.items()
    }
    seconds, flops = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    for step in range((2 + MEASURED) * INTERVAL):
        for work, optimizer in optimizers.items():
            backward(models[work], optimizer, step)
            torch.distributed.barrier()
            begin = time.perf_counter()
            if step < INTERVAL:  # every layer has had its turn afterwards
                optimizer.step()
            elif step < 2 * INTERVAL:
                flops[work] += flops_of(optimizer)
            else:
                optimizer.step()
                seconds[work] += time.perf_counter() - begin
    return {work: (seconds[work], flops[work]) for work in WAYS}


def test_two_ranks_do_little_more_than_half_each(tmp_path: Path) -> None:
    answers = launch(2, costs, tmp_path)
    for answer in answers:
        (shared, fewer), (replicated, all_of_them) = answer["shared"], answer["replicated"]
        print(f"FLOPs {fewer / all_of_them:.3f}, seconds {shared / replicated:.3f} of replicated")
        assert 0 < fewer <= 0.6 * all_of_them
        assert shared < 0.9 * replicated  # on a machine that others use as well
    both = sum(answer["shared"][1] for answer in answers)
    assert both >= answers[0]["replicated"][1]
