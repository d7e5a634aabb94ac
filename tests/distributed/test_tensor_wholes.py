"""Tensor parallelism with tensor_parallel="exact": whole matrices, and a single process's steps."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from gomuon import Adaptive, GoMuon, LayerSpec
from gomuon.distributed.shards import shard_rows
from gomuon.distributed.tensor_wholes import Grid, row_ranges_on
from gomuon.errors import NonFiniteGradientError, RankError
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS as REGISTRY
from tests.distributed.launcher import Place, launch
from tests.distributed.test_checkpoints_of_ranks import load, states
from tests.distributed.worlds import Weights, assert_alike, distance, weights
from tests.methods.table import make
from tests.versions import ONE_PROCESS

STEPS = 20
ROWS, POSITIONS, WIDTH = 8, 4, 8
# Shampoo and SOAP divide by roots of nearly singular Gram matrices; square layers avoid that here.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GoMuon": ("GoMuon", {}),
    "K=1": ("GoMuon", {"refresh_every": 1, "geometry_decay": True, "weight_decay": 0.1}),
    "cut": ("GoMuon", {"block_size": 3, "input_decay": 0.9, "stagger": False}),
    "rows": ("GoMuon", {"rows": 9, "max_side": 8, "long_sides": "diagonal"}),
    "heads": (
        "GoMuon",
        {
            "specs": {
                "attn.*.weight": LayerSpec(parts=2, heads=2),
                "down.weight": LayerSpec(input_heads=4),
            }
        },
    ),
    "adapts": ("GoMuon", {"refresh_every": Adaptive(0.97, most=8)}),
    "KFAC": ("KFAC", {}),  # joins biases, also that of the row-parallel layer
    "NewtonMuon": ("NewtonMuon", {"refresh_every": 2}),
    "MuonQK": ("MuonQK", {}),  # reads whole weights of partners
    "Muon": ("Muon", {}),
    "Shampoo": ("Shampoo", {"graft": "adagrad", "factor_decay": 1.0}),
    "SOAP": ("SOAP", {"refresh_every": 4}),
}


class Net(nn.Module):
    """Two layers that are cut along their outputs and one along its inputs; the rest is whole."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.RMSNorm(WIDTH)
        self.attn = nn.Module()
        self.attn.heads = 2  # type: ignore[assignment]
        self.attn.q, self.attn.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.plain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.recomputes = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            middle: Tensor = checkpoint(self.middle, x, use_reentrant=False)
        else:
            middle = self.middle(x)
        found: Tensor = self.head(torch.tanh(self.plain(middle)))
        return found

    def middle(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        found: Tensor = x + self.down(torch.tanh(self.attn.q(h)) * (1 + self.attn.k(h)))  # type: ignore[operator]
        return found


PLAN = {"attn.q": ColwiseParallel, "attn.k": ColwiseParallel, "down": RowwiseParallel}


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)


def divided(net: nn.Module, replicas: int = 1) -> nn.Module:
    """The net over all ranks, and its rows over `replicas` of them."""
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("rows", "layers")
    )
    parallelize_module(net, mesh["layers"], {name: style() for name, style in PLAN.items()})
    if replicas > 1:
        fully_shard(net, mesh=mesh["rows"])
    return net


def made(method: str, model: nn.Module, **settings: Any) -> MatrixOptimizer:
    name, own = METHODS[method]
    return make(name, model, **own, **settings)


def train(
    model: nn.Module, optimizer: MatrixOptimizer, steps: range, replicas: int = 1, replica: int = 0
) -> None:
    for step in steps:
        x = inputs(step).chunk(replicas)[replica]
        optimizer.zero_grad()
        (model(x).square().sum() * replicas / ROWS).backward()
        optimizer.step()


def alone(method: str, steps: range = range(STEPS), *, turns: bool = True) -> Weights:
    """In turns, as ranks take them by default, unless the method's settings say otherwise."""
    model, (name, own) = Net(), METHODS[method]
    settings = {"stagger": turns} if "stagger" in REGISTRY[name].recipe.settings else {}
    train(model, make(name, model, **{**settings, **own}), steps)
    return weights(model)


def runs(place: Place, methods: list[str], replicas: int) -> dict[str, Weights]:
    found = {}
    replica = place.rank // (place.size // replicas)
    for method in methods:
        model = divided(Net(), replicas)
        optimizer = made(method, model, tensor_parallel="exact")
        train(model, optimizer, range(STEPS), replicas, replica)
        assert len(set(optimizer.owners().values())) > 1
        found[method] = weights(model)
    return found


@pytest.mark.parametrize(
    ("size", "replicas", "methods"),
    [
        (2, 1, list(METHODS)),
        (4, 1, ["GoMuon", "KFAC", "Muon"]),
        (4, 2, ["GoMuon", "K=1", "cut", "heads", "KFAC", "MuonQK", "Muon", "SOAP"]),
    ],
    ids=["2", "4", "2x2"],
)
def test_ranks_equal_a_single_process(
    size: int, replicas: int, methods: list[str], tmp_path: Path
) -> None:
    answers = launch(size, runs, tmp_path, methods=methods, replicas=replicas)
    for method in methods:
        ranks = [answer[method] for answer in answers]
        assert_alike(ranks)
        assert distance(ranks[0], alone(method)) < 1e-9, method


def replicated(place: Place, method: str) -> Weights:
    """Replicas of shards of divided layers: a mesh of three dimensions."""
    names = ("copies", "rows", "layers")
    mesh = init_device_mesh("cpu", (2, 1, place.size // 2), mesh_dim_names=names)
    model = Net()
    parallelize_module(model, mesh["layers"], {name: style() for name, style in PLAN.items()})
    fully_shard(model, mesh=mesh["copies", "rows"])
    optimizer = made(method, model, tensor_parallel="exact")
    train(model, optimizer, range(STEPS), 2, place.rank // (place.size // 2))
    return weights(model)


def test_replicas_of_shards_of_divided_layers(tmp_path: Path) -> None:
    answers = launch(4, replicated, tmp_path, method="GoMuon")
    assert_alike(answers)
    assert distance(answers[0], alone("GoMuon")) < 1e-9


# ---- what is sent --------------------------------------------------------------------------------


@contextlib.contextmanager
def exchanges() -> Iterator[list[int]]:
    """The bytes that each exchange sends from here on."""
    sizes: list[int] = []
    real = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(given.numel() * given.element_size())
        return real(output, given, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield sizes


def sent(place: Place, method: str) -> list[list[int]]:
    """What forward and backward pass of each of five steps exchange."""
    model = divided(Net())
    optimizer = made(method, model, tensor_parallel="exact", **_together(method))
    found = []
    for step in range(5):
        with exchanges() as sizes:
            (model(inputs(step)).square().sum() / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sizes)
    return found


def _together(method: str) -> dict[str, Any]:
    return {} if method in ("KFAC", "Muon") else {"stagger": False}


@pytest.mark.parametrize(
    ("method", "refreshes"), [("GoMuon", [0, 4]), ("KFAC", [0, 1, 2, 3, 4]), ("Muon", [])]
)
def test_only_refresh_steps_exchange_rows(
    method: str, refreshes: list[int], tmp_path: Path
) -> None:
    """δ of the two column-parallel layers and x of the row-parallel one: half of all columns."""
    half = ROWS * POSITIONS * WIDTH // 2 * 8
    for found in launch(2, sent, tmp_path, method=method):
        assert found == [[half] * 3 if step in refreshes else [] for step in range(5)]


# ---- ways of training ----------------------------------------------------------------------------


def varied(place: Place, replicas: int) -> Weights:
    """Micro-batches of two sizes, recomputed activations and a mask."""
    replica = place.rank // (place.size // replicas)
    net = Net()
    net.recomputes = True
    model = divided(net, replicas)
    in_parts(model, GoMuon(model, tensor_parallel="exact", stagger=False), replicas, replica)
    return weights(model)


def in_parts(
    model: nn.Module, optimizer: MatrixOptimizer, replicas: int = 1, replica: int = 0
) -> None:
    mask = (torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS) % 3 > 0).double()
    for step in range(9):
        optimizer.zero_grad()
        own = inputs(step).chunk(replicas)[replica]
        for part, its in zip(
            own.split((1, len(own) - 1)),
            mask.chunk(replicas)[replica].split((1, len(own) - 1)),
            strict=True,
        ):
            with optimizer.statistics_mask(its):
                loss = model(part).square().sum() * replicas / ROWS
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)], ids=["2", "2x2"])
def test_micro_batches_masks_and_recomputation(size: int, replicas: int, tmp_path: Path) -> None:
    answers = launch(size, varied, tmp_path, replicas=replicas)
    assert_alike(answers)
    model = Net()
    in_parts(model, GoMuon(model))
    assert distance(answers[0], weights(model)) < 1e-9


def in_sequence(place: Place) -> Weights:
    """The norm and the residual stream hold a part of the positions; `down` hands out its rows."""
    model = Net()
    positions = Shard(1)
    plan = {
        "norm": SequenceParallel(),
        "attn.q": ColwiseParallel(input_layouts=positions),
        "attn.k": ColwiseParallel(input_layouts=positions),
        "down": RowwiseParallel(output_layouts=positions),
        "plain": ColwiseParallel(input_layouts=positions),
        "head": RowwiseParallel(),
    }
    parallelize_module(model, init_device_mesh("cpu", (place.size,)), plan)
    optimizer = GoMuon(model, tensor_parallel="exact")
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(inputs(step).chunk(place.size, 1)[place.rank]).square().sum() / ROWS).backward()
        optimizer.step()
    return weights(model)


def test_sequence_parallelism_adds_up(tmp_path: Path) -> None:
    answers = launch(2, in_sequence, tmp_path)
    assert_alike(answers)
    assert distance(answers[0], alone("GoMuon")) < 1e-9


def averaged(place: Place, settings: dict[str, Any]) -> Weights:
    """Whole models on two ranks each; their gradients are averaged without a wrapper."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "layers"))
    model = parallelize_module(
        Net(), mesh["layers"], {name: style() for name, style in PLAN.items()}
    )
    optimizer = GoMuon(model, tensor_parallel="exact", process_group=dist.group.WORLD, **settings)
    for step in range(STEPS):
        x = inputs(step).chunk(2)[place.rank // 2]
        optimizer.zero_grad()
        (model(x).square().sum() * 2 / ROWS).backward()
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            here = gradient if not hasattr(gradient, "to_local") else gradient.to_local()
            dist.all_reduce(here, group=mesh.get_group(0))
            here.div_(2)
        optimizer.step()
    assert len(set(optimizer.owners().values())) == 4  # not only those of one copy
    return weights(model)


def test_gradients_averaged_by_hand(tmp_path: Path) -> None:
    answers = launch(4, averaged, tmp_path, settings={})
    assert_alike(answers)
    assert distance(answers[0], alone("GoMuon")) < 1e-9


# ---- checkpoints ---------------------------------------------------------------------------------


def saved_and_loaded(place: Place, replicas: int, method: str) -> tuple[Weights, Weights]:
    replica = place.rank // (place.size // replicas)
    model = divided(Net(), replicas)
    optimizer = made(method, model, tensor_parallel="exact")
    train(model, optimizer, range(6), replicas, replica)
    folder = place.folder / "checkpoint"
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    other = divided(Net(9), replicas)
    resumed = made(method, other, tensor_parallel="exact")
    load(other, resumed, folder)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(6, 12), replicas, replica)
    return weights(model), weights(other)


@pytest.mark.parametrize(
    ("size", "replicas", "method"), [(2, 1, "GoMuon"), (2, 1, "KFAC"), (4, 2, "GoMuon")]
)
def test_training_goes_on_to_the_bit(size: int, replicas: int, method: str, tmp_path: Path) -> None:
    for one, other in launch(size, saved_and_loaded, tmp_path, replicas=replicas, method=method):
        assert_alike([one, other])


def saved(place: Place, replicas: int, target: str) -> Any:
    replica = place.rank // (place.size // replicas)
    model = divided(Net(), replicas)
    optimizer = GoMuon(model, tensor_parallel="exact", stagger=False)
    train(model, optimizer, range(6), replicas, replica)
    dcp.save(states(model, optimizer), checkpoint_id=target)
    return optimizer.consolidated_state_dict()


def gone_on(place: Place, source: str) -> Weights:
    model = divided(Net(9))
    optimizer = GoMuon(model, tensor_parallel="exact", stagger=False)
    load(model, optimizer, Path(source))
    train(model, optimizer, range(6, 12))
    return weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_is_a_single_processs_and_fits_any_mesh(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    states_of_ranks = launch(4, saved, tmp_path, replicas=2, target=folder)
    expected = alone("GoMuon", range(12), turns=False)
    model = Net(9)
    optimizer = GoMuon(model)
    load(model, optimizer, Path(folder), **ONE_PROCESS)
    start = weights(model)
    train(model, optimizer, range(6, 12))
    assert distance(weights(model), expected) < 1e-9
    answers = launch(2, gone_on, tmp_path, source=folder)
    assert_alike(answers)
    assert distance(answers[0], expected) < 1e-9
    for state in states_of_ranks[::3]:
        model.load_state_dict(start)
        whole = GoMuon(model)
        whole.load_state_dict(state)
        train(model, whole, range(6, 12))
        assert distance(weights(model), expected) < 1e-9


# ---- faults --------------------------------------------------------------------------------------


def spoiled(place: Place) -> tuple[str, str]:
    """One rank's part of a gradient is not finite; then a rank fails in its step."""
    model = divided(Net())
    before = weights(model)
    optimizer = GoMuon(model, tensor_parallel="exact")
    model(inputs(0)).square().sum().backward()
    gradient: Any = model.get_parameter("down.weight").grad
    kept = gradient.to_local().clone()
    if place.rank == 1:
        gradient.to_local().fill_(torch.nan)
    with pytest.raises(NonFiniteGradientError) as first:
        optimizer.step()
    gradient.to_local().copy_(kept)

    def fail(*_: Any) -> None:
        raise ArithmeticError("no direction")

    if place.rank == 1:
        optimizer._step.directions = fail  # type: ignore[assignment, method-assign]
    with pytest.raises((ArithmeticError, RankError)) as second:
        optimizer.step()
    assert_alike([before, weights(model)])
    return str(first.value), f"{type(second.value).__name__}: {second.value}"


def test_ranks_fail_together_and_nothing_changes(tmp_path: Path) -> None:
    (one, other), (same, own) = launch(2, spoiled, tmp_path)
    assert one == same
    assert one.startswith("on rank 1, the gradient of 'down.weight' holds NaN or infinity")
    assert own.startswith("ArithmeticError: no direction")
    assert other.startswith("RankError: rank 1 failed in the optimizer's step")


def refusals(place: Place) -> dict[str, str]:
    def message(change: Callable[[], Any]) -> str:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            change()
        return str(raised.value)

    def value() -> Any:
        return GoMuon(divided(Net()), tensor_parallel="whole")

    def work() -> Any:
        return GoMuon(divided(Net()), tensor_parallel="exact", work="replicated").owners()

    def group() -> Any:
        alone = [dist.new_group([rank]) for rank in range(place.size)][place.rank]
        return GoMuon(divided(Net()), tensor_parallel="exact", process_group=alone).owners()

    table = str(GoMuon(divided(Net()), tensor_parallel="exact").routing_table())
    return {"table": table, **{change.__name__: message(change) for change in (value, work, group)}}


def test_the_table_and_what_is_refused(tmp_path: Path) -> None:
    (found, _) = launch(2, refusals, tmp_path)
    lines = {line.split()[0]: line for line in found["table"].splitlines()}
    assert lines["attn.q.weight"].endswith("column-parallel, gathered from 2 ranks")
    assert " 8 × 8 " in lines["attn.q.weight"]
    assert lines["down.weight"].endswith("row-parallel, gathered from 2 ranks")
    assert found["value"] == 'tensor_parallel must be "blocks" or "exact", got \'whole\''
    assert "work='replicated' with tensor_parallel=\"exact\" is not possible" in found["work"]
    assert "a mesh of 2 ranks, but the process group has 1" in found["group"]


# ---- parts of a tensor ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((7, 6), (0, 0)),
        ((7, 6), (0, 1)),
        ((7, 6), (None, 1)),
        ((7,), (0, None)),
        ((7, 6, 2), (0, 1)),
    ],
)
def test_parts_cover_a_tensor_once_for_each_replica(
    shape: tuple[int, ...], cuts: tuple[int | None, int | None]
) -> None:
    points = tuple((row, layer) for row in range(3) for layer in range(2))
    ranges = row_ranges_on(Grid((3, 2), points, ()), shape, cuts)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for replica in set(ranges.replicas):
        ranks = [rank for rank in range(6) if ranges.replicas[rank] == replica]
        ranks.sort(key=lambda rank: ranges.rows[rank])
        parts = [ranges.part(whole, rank) for rank in ranks]
        assert [tuple(part.shape) for part in parts] == [ranges.shape(rank) for rank in ranks]
        assert sum(part.numel() for part in parts) == whole.numel()
        assert torch.equal(ranges.joined(ranks, parts), whole)


def test_fully_shard_divides_the_rows_of_what_is_divided_already() -> None:
    ranges = row_ranges_on(Grid((2, 2), ((0, 0), (0, 1), (1, 0), (1, 1)), ()), (10, 3), (0, 0))
    assert ranges.rows == ((0, 3), (5, 8), (3, 5), (8, 10))
    assert shard_rows(5, 2) == [3, 2]
