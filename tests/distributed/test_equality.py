"""n ranks with a part of the batch each equal one with the union."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gomuon import KFAC, GoMuon, MuonQK
from gomuon.functional.polar_factor import PolarMethod
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import (
    SHARES,
    UNION,
    Weights,
    assert_alike,
    distance,
    language_loss,
    run,
    weights,
    wrapped,
)
from tests.models import SYMBOLS, tokens, transformer
from tests.test_null_space import layer_norm_model

STEPS = 20
BUILD = partial(transformer, layers=2)
METHODS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "K=1": (GoMuon, {"refresh_every": 1}),
    "K=4": (GoMuon, {"stagger": False}),
    "stagger": (GoMuon, {"stagger": "auto"}),  # on where ranks share the work
    "geometry_decay": (GoMuon, {"geometry_decay": True, "weight_decay": 0.1, "stagger": False}),
    "blocks": (GoMuon, {"block_size": 7, "input_decay": 0.9, "stagger": True}),
    "int8": (GoMuon, {"state_dtype": "int8", "input_decay": 0.9, "stagger": False}),
    "KFAC": (KFAC, {}),
    "MuonQK": (MuonQK, {"heads": 2}),
}


def make(method: str, model: nn.Module, alone: bool = False) -> MatrixOptimizer:
    kind, own = METHODS[method]
    return kind(model, **{**own, **({"stagger": True} if alone and method == "stagger" else {})})


def runs(place: Place, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Weights]:
    return {
        (kind, method): run(place, kind, partial(make, method), STEPS, BUILD)
        for kind, method in cases
    }


@pytest.mark.parametrize(
    ("size", "kinds", "methods"),
    [
        (1, ("ddp", "fsdp"), ("K=1", "K=4")),
        (2, ("ddp", "fsdp"), ("K=1", "K=4", "stagger")),
        (4, ("ddp", "fsdp", "hybrid"), ("K=1", "K=4", "stagger")),
        (2, ("ddp", "fsdp"), ("geometry_decay", "blocks", "int8", "KFAC", "MuonQK")),
    ],
    ids=["1", "2", "4", "other methods"],
)
def test_ranks_equal_one_with_the_union(
    size: int, kinds: tuple[str, ...], methods: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [(kind, method) for kind in kinds for method in methods]
    answers = launch(size, runs, tmp_path, cases=cases)
    for method in methods:
        alone = run(None, "alone", partial(make, method, alone=True), STEPS, BUILD)
        for kind in kinds:
            ranks = [answer[kind, method] for answer in answers]
            assert_alike(ranks)
            assert distance(ranks[0], alone) < 1e-9, (kind, method)


def layer_norm_run(place: Place | None, polar: PolarMethod) -> Weights:
    kind = "alone" if place is None else "ddp"
    build = partial(layer_norm_model, SYMBOLS)
    return run(place, kind, partial(GoMuon, polar=polar, stagger=True), STEPS, build)


def test_ranks_equal_one_beside_a_layer_norm(tmp_path: Path) -> None:
    """Where gradients lack a rank: the default leaves it alone, the paper's factor makes noise."""
    answers = launch(2, layer_norm_run, tmp_path, polar="exact")
    assert_alike(answers)
    assert distance(answers[0], layer_norm_run(None, "exact")) < 1e-9
    noisy = launch(2, layer_norm_run, tmp_path, polar="svd")
    assert_alike(noisy)
    assert distance(noisy[0], layer_norm_run(None, "svd")) > 1e-6


# ---- an expert that sees tokens on one rank only, or on none -------------------------------------


class Net(nn.Module):
    """q and k share an input; the expert sees tokens on one rank only, in some steps."""

    def __init__(self, skips: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.skips = skips  # the expert, when no row is chosen
        self.q, self.k = nn.Linear(5, 6), nn.Linear(5, 6)
        self.expert, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.tanh(self.q(x)) * self.k(x)
        if chosen.any() or not self.skips:
            extra = torch.tanh(self.expert(hidden[chosen]))  # its gradients have full rank
            hidden = hidden.index_add(0, chosen.nonzero()[:, 0], extra)
        return self.head(hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows, and which of them go to the expert: the last rank's, or nobody's."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    chosen = torch.zeros(20, dtype=torch.bool)
    chosen[9:] = step % 2 == 0
    return x, chosen


def experts(
    place: Place | None, kind: str, method: str, skips: bool, stagger: bool = False
) -> Weights:
    """Summed losses in two micro-batches; DDP sends after the second only."""
    ranks = 1 if place is None else place.size
    net = Net(skips)
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    model = wrapped(net, kind, **options)
    common: dict[str, Any] = {"lr": 0.05, "loss_reduction": "sum"}
    optimizer = (
        KFAC(model, **common)
        if method == "KFAC"
        else GoMuon(model, refresh_every=2, stagger=stagger, **common)
    )
    for step in range(8):
        x, chosen = batch(step)
        mine = slice(0, 20) if place is None else place.share((8, 12))
        optimizer.zero_grad()
        first, second = slice(mine.start, mine.start + 3), slice(mine.start + 3, mine.stop)
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                (ranks * model(x[first], chosen[first]).square().sum()).backward()
        else:
            (ranks * model(x[first], chosen[first]).square().sum()).backward()
        (ranks * model(x[second], chosen[second]).square().sum()).backward()
        assert (net.expert.weight.grad is None) == (skips and step % 2 == 1)
        optimizer.step()
    return weights(model)


def experts_of(place: Place, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Weights]:
    # FSDP2 wants a gradient of every layer on every rank, if only of no rows.
    return {(kind, method): experts(place, kind, method, kind == "ddp") for kind, method in cases}


def test_a_rank_whose_layer_saw_nothing_adds_nothing(tmp_path: Path) -> None:
    cases = [(kind, method) for kind in ("ddp", "fsdp") for method in ("GoMuon", "KFAC")]
    answers = launch(2, experts_of, tmp_path, cases=cases)
    for kind, method in cases:
        ranks = [answer[kind, method] for answer in answers]
        assert_alike(ranks)
        alone = experts(None, "alone", method, skips=kind == "ddp")
        assert distance(ranks[0], alone) < 1e-9, (kind, method)


# ---- a bound on the rows -------------------------------------------------------------------------


def bounded(place: Place | None, kind: str) -> Weights:
    """Each rank's share, or all shares as micro-batches of one process."""
    model = wrapped(BUILD(), kind)
    optimizer = GoMuon(model, rows=16, refresh_every=2, stagger=True)
    shares = SHARES[2]
    for step in range(6):
        window = tokens(step, UNION)
        optimizer.zero_grad()
        if place is None:
            for part in window.split(shares):
                language_loss(model, part, window[:, 1:].numel(), 1).backward()
        else:
            mine = window[place.share(shares)]
            language_loss(model, mine, window[:, 1:].numel(), place.size).backward()
        optimizer.step()
    return weights(model)


def bounded_on_ranks(place: Place) -> dict[str, Weights]:
    return {kind: bounded(place, kind) for kind in ("ddp", "fsdp")}


def test_a_bound_holds_on_every_rank(tmp_path: Path) -> None:
    answers = launch(2, bounded_on_ranks, tmp_path)
    alone = bounded(None, "alone")
    for kind in ("ddp", "fsdp"):
        ranks = [answer[kind] for answer in answers]
        assert_alike(ranks)
        assert distance(ranks[0], alone) < 1e-9, kind
