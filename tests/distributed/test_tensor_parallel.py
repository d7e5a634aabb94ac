"""Tensor parallelism: each rank's block is a matrix of its own, as if `specs` had cut it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from gomuon import KFAC, Adaptive, GoMuon, LayerSpec, Muon, Shampoo
from gomuon.errors import GeometryWarning, NonFiniteGradientError, RankError
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.test_checkpoints_of_ranks import load, states
from tests.distributed.worlds import Weights, assert_alike, distance, weights

STEPS = 20
ROWS, POSITIONS, WIDTH = 8, 4, 8
METHODS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "GoMuon": (GoMuon, {}),
    "K=1": (GoMuon, {"refresh_every": 1, "geometry_decay": True, "weight_decay": 0.1}),
    "blocks": (GoMuon, {"block_size": 3, "stagger": True, "input_decay": 0.9}),
    "int8": (GoMuon, {"state_dtype": "int8", "rows": 9}),
    "adapts": (GoMuon, {"refresh_every": Adaptive(0.97, most=8), "stagger": True}),
    "Muon": (Muon, {}),
    "Shampoo": (Shampoo, {}),
    "KFAC": (KFAC, {}),
}


def steps_of(method: str) -> int:
    """Two for Shampoo: roots of its first, nearly singular Gram matrices magnify rounding."""
    return 2 if method == "Shampoo" else STEPS


class Net(nn.Module):
    """Two layers that are cut along their outputs and one along its inputs; the rest is whole."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 12, bias), nn.Linear(WIDTH, 12, bias)
        self.down = nn.Linear(12, WIDTH, bias)
        self.plain, self.head = nn.Linear(WIDTH, 6, bias), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = x + self.down(torch.tanh(self.gate(h)) * (1 + self.up(h)))
        return self.head(torch.tanh(self.plain(h)))


def specs_of(parts: int) -> dict[str, LayerSpec]:
    """The blocks that so many ranks have, for a single process."""
    outputs, inputs = LayerSpec(heads=parts), LayerSpec(input_heads=parts)
    return {"gate.weight": outputs, "up.weight": outputs, "down.weight": inputs}


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)


PLAN = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


def divided(net: nn.Module, replicas: int = 1) -> nn.Module:
    """The net over all ranks, and its rows over `replicas` of them."""
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("rows", "layers")
    )
    parallelize_module(net, mesh["layers"], {name: style() for name, style in PLAN.items()})
    if replicas > 1:
        fully_shard(net, mesh=mesh["rows"])
    return net


def train(
    model: nn.Module, optimizer: MatrixOptimizer, steps: range, replicas: int = 1, replica: int = 0
) -> None:
    for step in steps:
        x = inputs(step).chunk(replicas)[replica]
        optimizer.zero_grad()
        (model(x).square().sum() * replicas / ROWS).backward()
        optimizer.step()


def alone(method: str, parts: int, *, bias: bool = True, turns: bool = False) -> Weights:
    kind, own = METHODS[method]
    model = Net(bias=bias)
    settings = {**own, **({"stagger": True} if turns and method == "GoMuon" else {})}
    optimizer = kind(model, specs=specs_of(parts), **settings)
    train(model, optimizer, range(steps_of(method)))
    return weights(model)


def runs(place: Place, methods: list[str], replicas: int, bias: bool) -> dict[str, Weights]:
    found = {}
    replica = place.rank // (place.size // replicas)
    for method in methods:
        kind, settings = METHODS[method]
        model = divided(Net(bias=bias), replicas)
        optimizer = kind(model, **settings)
        train(model, optimizer, range(steps_of(method)), replicas, replica)
        found[method] = weights(model)
    return found


@pytest.mark.parametrize(
    ("size", "replicas", "methods"),
    [
        (2, 1, ["GoMuon", "K=1", "blocks", "int8", "adapts", "Muon", "Shampoo"]),
        (4, 1, ["GoMuon"]),
        (4, 2, ["GoMuon", "K=1", "blocks", "adapts", "Muon"]),
    ],
    ids=["2", "4", "2x2"],
)
def test_blocks_equal_a_process_that_cuts_them(
    size: int, replicas: int, methods: list[str], tmp_path: Path
) -> None:
    answers = launch(size, runs, tmp_path, methods=methods, replicas=replicas, bias=True)
    for method in methods:
        ranks = [answer[method] for answer in answers]
        assert_alike(ranks)
        # Layers take turns by default where ranks have the same blocks, not where each has its own.
        one = alone(method, size // replicas, turns=replicas > 1)
        assert distance(ranks[0], one) < 1e-9, method


def test_replicated_layers_count_once_in_a_sum_over_layers(tmp_path: Path) -> None:
    """K-FAC's budget. Without biases: that of a row-parallel layer does not join its weight."""
    answers = launch(2, runs, tmp_path, methods=["KFAC"], replicas=1, bias=False)
    ranks = [answer["KFAC"] for answer in answers]
    assert_alike(ranks)
    assert distance(ranks[0], alone("KFAC", 2, bias=False)) < 1e-9


FUSED = {"up.weight": LayerSpec(parts=2, heads=3), "down.weight": LayerSpec(input_heads=4)}


def fused(place: Place) -> Weights:
    """Of six heads of two fused layers each rank has three."""
    model = divided(Net())
    train(model, GoMuon(model, specs=FUSED), range(STEPS))
    return weights(model)


def test_fused_layers_whose_heads_are_divided(tmp_path: Path) -> None:
    answers = launch(2, fused, tmp_path)
    assert_alike(answers)
    model = Net()
    train(model, GoMuon(model, specs={"gate.weight": LayerSpec(heads=2), **FUSED}), range(STEPS))
    assert distance(answers[0], weights(model)) < 1e-9


# ---- gradients averaged by hand, and sequence parallelism ----------------------------------------


def averaged(place: Place) -> Weights:
    """Whole blocks on two ranks each; their gradients are averaged without a wrapper."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "layers"))
    model = parallelize_module(
        Net(), mesh["layers"], {name: style() for name, style in PLAN.items()}
    )
    group = mesh.get_group(0)
    optimizer = GoMuon(model, process_group=group)
    for step in range(STEPS):
        x = inputs(step).chunk(2)[place.rank // 2]
        optimizer.zero_grad()
        (model(x).square().sum() * 2 / ROWS).backward()
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            here = gradient if not hasattr(gradient, "to_local") else gradient.to_local()
            dist.all_reduce(here, group=group)
            here.div_(2)
        optimizer.step()
    assert set(optimizer.owners().values()) == {0, 1}
    return weights(model)


def test_blocks_with_owners_among_the_ranks_that_have_them(tmp_path: Path) -> None:
    answers = launch(4, averaged, tmp_path)
    assert_alike(answers)
    assert distance(answers[0], alone("GoMuon", 2, turns=True)) < 1e-9


def in_sequence(place: Place) -> Weights:
    """The norm and the residual stream hold a part of the positions; `down` hands out its rows."""
    model = Net()
    mesh = init_device_mesh("cpu", (place.size,))
    positions = Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "norm": SequenceParallel(),
            "gate": ColwiseParallel(input_layouts=positions),
            "up": ColwiseParallel(input_layouts=positions),
            "down": RowwiseParallel(output_layouts=positions),
            "plain": ColwiseParallel(input_layouts=positions),
            "head": RowwiseParallel(),
        },
    )
    optimizer = GoMuon(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(inputs(step).chunk(place.size, 1)[place.rank]).square().sum() / ROWS).backward()
        optimizer.step()
    return weights(model)


def test_sequence_parallelism_adds_up(tmp_path: Path) -> None:
    answers = launch(2, in_sequence, tmp_path)
    assert_alike(answers)
    model = Net()
    specs = {**specs_of(2), "plain.weight": LayerSpec(heads=2)}
    train(model, GoMuon(model, specs=specs), range(STEPS))
    assert distance(answers[0], weights(model)) < 1e-9


def rows_divided(place: Place) -> tuple[list[str], Weights]:
    """A whole layer that reads a part of the positions on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plan = {"0": SequenceParallel(), "2": ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(model, init_device_mesh("cpu", (place.size,)), plan)
    optimizer = GoMuon(model, routes={"2.weight": "matrix"})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            part = inputs(step).chunk(place.size, 1)[place.rank]
            model(part).square().sum().backward()
            optimizer.step()
    told = [str(one.message) for one in said if issubclass(one.category, GeometryWarning)]
    return told, weights(model)


def test_a_whole_layer_with_divided_rows_is_not_captured(tmp_path: Path) -> None:
    answers = launch(2, rows_divided, tmp_path)
    for told, _ in answers:
        assert len(told) == 1
        assert told[0].startswith("nothing was captured for '0.weight'")
    assert_alike([after for _, after in answers])


# ---- checkpoints ---------------------------------------------------------------------------------


def saved_and_loaded(place: Place, replicas: int, method: str) -> tuple[Weights, Weights]:
    kind, settings = METHODS[method]
    replica = place.rank // (place.size // replicas)
    model = divided(Net(), replicas)
    optimizer = kind(model, **settings)
    train(model, optimizer, range(6), replicas, replica)
    folder = place.folder / "checkpoint"
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    other = divided(Net(), replicas)
    resumed = kind(other, **settings)
    load(other, resumed, folder)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(6, 12), replicas, replica)
    with pytest.raises(ValueError, match=r"save and load with torch\.distributed\.checkpoint"):
        optimizer.consolidated_state_dict()
    return weights(model), weights(other)


@pytest.mark.parametrize(
    ("size", "replicas", "method"), [(2, 1, "GoMuon"), (2, 1, "int8"), (4, 2, "GoMuon")]
)
def test_training_goes_on_to_the_bit(size: int, replicas: int, method: str, tmp_path: Path) -> None:
    for one, other in launch(size, saved_and_loaded, tmp_path, replicas=replicas, method=method):
        assert_alike([one, other])


# ---- faults --------------------------------------------------------------------------------------


def spoiled(place: Place) -> tuple[str, str, Weights]:
    """One rank's block of a gradient is not finite; then a rank fails in its step."""
    model = divided(Net())
    before = weights(model)
    optimizer = GoMuon(model, nonfinite="raise")
    model(inputs(0)).square().sum().backward()
    gradient: Any = model.up.weight.grad  # type: ignore[union-attr]
    kept = gradient.to_local().clone()
    if place.rank == 1:
        gradient.to_local().fill_(torch.nan)
    with pytest.raises(NonFiniteGradientError) as first:
        optimizer.step()
    gradient.to_local().copy_(kept)
    assert_alike([before, weights(model)])

    def fail(*_: Any) -> None:
        raise ArithmeticError("no direction")

    if place.rank == 1:
        optimizer._step.directions = fail  # type: ignore[assignment, method-assign]
    with pytest.raises((ArithmeticError, RankError)) as second:
        optimizer.step()
    return str(first.value), f"{type(second.value).__name__}: {second.value}", weights(model)


def test_ranks_that_divide_a_layer_fail_together(tmp_path: Path) -> None:
    (one, other, _), (same, own, _) = launch(2, spoiled, tmp_path)
    assert one == same
    assert one.startswith("on rank 1, the gradient of 'up.weight' holds NaN or infinity")
    assert own == "ArithmeticError: no direction"
    assert other.startswith("RankError: rank 1 failed in the optimizer's step")


def refusals(place: Place) -> dict[str, str]:
    def made(change: Callable[[], Any]) -> str:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            change()
        return str(raised.value)

    mesh = init_device_mesh("cpu", (2,))

    def uneven() -> Any:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        return GoMuon(parallelize_module(model, mesh, {"0": ColwiseParallel()}))

    def heads() -> Any:
        return GoMuon(divided(Net()), specs={"up.weight": LayerSpec(heads=3)})

    def fused() -> Any:
        return GoMuon(divided(Net()), specs={"up.weight": LayerSpec(parts=3)})

    def bare() -> Any:
        return GoMuon(divided(Net()).parameters())

    def work() -> Any:
        return GoMuon(divided(Net()), work="shared").owners()

    def flat() -> Any:
        plane = init_device_mesh("cpu", (2, 1))
        from torch.distributed.tensor import Replicate, distribute_tensor

        model = Net()
        weight = distribute_tensor(model.up.weight.detach(), plane, [Shard(0), Replicate()])
        model.up.weight = nn.Parameter(weight)
        return GoMuon(model)

    table = str(GoMuon(divided(Net())).routing_table())
    functions = (uneven, heads, fused, bare, work, flat)
    return {"table": table, **{change.__name__: made(change) for change in functions}}


def test_the_table_and_what_is_refused(tmp_path: Path) -> None:
    (found, _) = launch(2, refusals, tmp_path)
    lines = {line.split()[0]: line for line in found["table"].splitlines()}
    assert lines["up.weight"].endswith("linear layer; column-parallel, block 0 of 2")
    assert " 6 × 8 " in lines["up.weight"]
    assert lines["down.weight"].endswith("linear layer; row-parallel, block 0 of 2")
    assert " 8 × 6 " in lines["down.weight"]
    assert lines["plain.weight"].endswith("linear layer")
    assert "2 ranks do not divide its dimension 0 equally" in found["uneven"]
    assert "heads=3 in the LayerSpec of 'up.weight'" in found["heads"]
    assert "parts=3 with heads=1 in the LayerSpec of 'up.weight'" in found["fused"]
    assert "pass the model, not its parameters" in found["bare"]
    assert "needs process_group=" in found["work"]
    assert "a mesh of 2 dimensions" in found["flat"]
