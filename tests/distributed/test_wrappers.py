"""What else is done with DDP and FSDP2: precision, frozen and later layers, convolutions, ties."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from gomuon import KFAC, GoMuon, Muon
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, train, weights, wrapped
from tests.models import mlp, transformer

# ---- mixed precision -----------------------------------------------------------------------------


def mixed(place: Place, reduce: torch.dtype) -> tuple[Weights, list[float], set[torch.dtype]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = wrapped(transformer(dtype=torch.float32, layers=1), "fsdp", mp_policy=policy)
    optimizer = GoMuon(model)
    train(model, optimizer, range(6), place)
    kept = {
        value.dtype
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    }
    maps = [float(e["left_map"].norm()) for e in optimizer.state.values() if "left_map" in e]
    return weights(model), maps, kept


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_a_mixed_precision_policy_keeps_master_weights_and_state_wide(
    reduce: torch.dtype, tmp_path: Path
) -> None:
    answers = launch(2, mixed, tmp_path, reduce=reduce)
    assert_alike([trained for trained, _, _ in answers])
    model = transformer(dtype=torch.float32, layers=1)
    start = weights(model)
    train(model, GoMuon(model, stagger=True), range(6))
    exact = weights(model)
    for trained, maps, kept in answers:
        assert maps  # statistics were captured from the bfloat16 passes
        assert kept == {torch.float32}
        for name, tensor in trained.items():
            assert tensor.dtype == torch.float32
            moved = (exact[name] - start[name]).norm()
            assert (tensor - exact[name]).norm() < 0.5 * moved, name


# ---- which layers take part ----------------------------------------------------------------------


def changing(place: Place | None, kind: str) -> Weights:
    """A frozen layer, one unfrozen later, and a group added after sharding."""
    model = transformer(layers=2)
    # Under FSDP2 all parameters that are gathered together require gradients or none does.
    model.trunk.blocks[0].requires_grad_(False)
    outer = wrapped(model, kind)
    late = dict(model.trunk.blocks[0].named_parameters())
    held = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = GoMuon(model, refresh_every=2, stagger=True, routes=lambda name, *_: frozen(name))
    assert len(held) == sum(len(g["params"]) for g in optimizer.param_groups)
    train(outer, optimizer, range(3), place)
    model.trunk.blocks[0].requires_grad_(True)
    matrices = [(f"late.{n}", p) for n, p in late.items() if p.ndim == 2]
    others = [(f"late.{n}", p) for n, p in late.items() if p.ndim < 2]
    optimizer.add_param_group({"params": matrices, "treatment": "matrix"})
    if others:
        optimizer.add_param_group({"params": others, "treatment": "adamw"})
    train(outer, optimizer, range(3, 8), place)
    return weights(outer)


def frozen(name: str) -> Any:
    return "frozen" if name.startswith("trunk.blocks.0.") else None


def test_frozen_layers_and_groups_added_after_sharding(tmp_path: Path) -> None:
    alone = changing(None, "alone")
    answers = launch(2, changing, tmp_path, kind="fsdp")
    assert_alike(answers)
    assert distance(answers[0], alone) < 1e-9


# ---- other layers --------------------------------------------------------------------------------


class Images(nn.Module):
    """Grouped and strided convolutions, more ranks than some of their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, stride=2, groups=2)
        self.narrow, self.head = nn.Linear(6, 3), nn.Linear(3, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.narrow(hidden.mean((-2, -1)))))


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "convolutions": (Images, (3, 7, 7)),
    "tied": (Tied, (6,)),
}


def regression(place: Place | None, kind: str, name: str) -> Weights:
    build, shape = MODELS[name]
    model = wrapped(build(), kind)
    optimizer = GoMuon(model, lr=0.05, refresh_every=2, stagger=True)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, *shape, generator=generator, dtype=torch.float64)
        rows = slice(None) if place is None else place.share((24 // place.size,) * place.size)
        optimizer.zero_grad()
        (model(x[rows]) - 1).square().mean().backward()
        optimizer.step()
    return weights(model)


def regressions(place: Place, kinds: list[str]) -> dict[tuple[str, str], Weights]:
    return {(kind, name): regression(place, kind, name) for kind in kinds for name in MODELS}


@pytest.mark.parametrize("size", [2, 4])
def test_convolutions_and_tied_weights(size: int, tmp_path: Path) -> None:
    kinds = ["ddp", "fsdp"]
    answers = launch(size, regressions, tmp_path, kinds=kinds)
    for kind in kinds:
        for name in MODELS:
            ranks = [answer[kind, name] for answer in answers]
            assert_alike(ranks)
            assert distance(ranks[0], regression(None, "alone", name)) < 1e-9, (kind, name)


def half_frozen(place: Place | None, kind: str, frozen: str) -> Weights:
    """K-FAC joins a bias to its weight; one of the two is frozen."""
    model = mlp(6, 6, 6, 3)
    model.get_parameter(frozen).requires_grad_(False)
    outer = wrapped(model, kind)
    optimizer = KFAC(outer)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        rows = slice(None) if place is None else place.share((12, 12))
        optimizer.zero_grad()
        (outer(x[rows]) - 1).square().mean().backward()
        optimizer.step()
    return weights(outer)


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight"])
def test_half_of_a_joined_layer_frozen(frozen: str, tmp_path: Path) -> None:
    answers = launch(2, half_frozen, tmp_path, kind="ddp", frozen=frozen)
    assert_alike(answers)
    assert distance(answers[0], half_frozen(None, "alone", frozen)) < 1e-9


# ---- a group of its own, and work done alone -----------------------------------------------------


def apart(place: Place) -> Weights:
    """Two pairs of ranks, each with a model of its own."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    pair, within = divmod(place.rank, 2)
    model = transformer(seed=pair, layers=1)
    outer = nn.parallel.DistributedDataParallel(model, process_group=groups[pair])
    optimizer = GoMuon(outer)  # the group is the wrapper's
    train(outer, optimizer, range(4), Place(within, 2, place.folder))
    return weights(model)


def test_ranks_of_a_smaller_group_keep_to_themselves(tmp_path: Path) -> None:
    answers = launch(4, apart, tmp_path)
    for pair in range(2):
        model = transformer(seed=pair, layers=1)
        train(model, GoMuon(model, stagger=True), range(4))
        assert_alike(answers[2 * pair : 2 * pair + 2])
        assert distance(answers[2 * pair], weights(model)) < 1e-9


def alone(place: Place) -> Weights:
    model = transformer(seed=place.rank, layers=1)
    train(model, GoMuon(model, work="alone"), range(4))
    return weights(model)


def test_ranks_that_work_alone_send_nothing(tmp_path: Path) -> None:
    for rank, trained in enumerate(launch(2, alone, tmp_path)):
        model = transformer(seed=rank, layers=1)
        train(model, GoMuon(model), range(4))
        assert distance(trained, weights(model)) < 1e-12


# ---- refusals ------------------------------------------------------------------------------------


def refused(make: Callable[[], MatrixOptimizer]) -> str:
    try:
        make().step()
    except ValueError as error:
        return str(error)
    return ""


def refusals(place: Place) -> dict[str, str]:
    sharded = mlp(8, 8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    rows = mlp(8, 8, 8)
    fully_shard(rows, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=shard_last)
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return {
        "replicated": refused(partial(Muon, sharded, work="replicated")),
        "placement": refused(partial(Muon, rows)),
    }


def shard_last(parameter: nn.Parameter) -> Any:
    return Shard(parameter.ndim - 1)


def test_what_cannot_be_done_is_refused_with_the_reason(tmp_path: Path) -> None:
    for answer in launch(2, refusals, tmp_path):
        assert "these are sharded" in answer["replicated"]
        assert "expected one Shard(0)" in answer["placement"]
        assert "For tensor parallelism pass the model" in answer["placement"]


class FullyShardedDataParallel(nn.Module):
    """Known by its name, as the real one is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_fsdp1_is_refused_and_told_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"flattens parameters.*fully_shard"):
        GoMuon(FullyShardedDataParallel(mlp(4, 4, 4)))
