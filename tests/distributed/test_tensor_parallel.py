"""Tensor parallelism: each rank's block is a matrix of its own, as if `specs` had cut it."""

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

from gomuon import KFAC, GoMuon, LayerSpec, Muon, Shampoo
from gomuon.errors import NonFiniteGradientError, RankError
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
    "Muon": (Muon, {}),
    "Shampoo": (Shampoo, {}),
    "KFAC": (KFAC, {}),
}


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


def alone(method: str, parts: int, *, bias: bool = True) -> Weights:
    kind, settings = METHODS[method]
    model = Net(bias=bias)
    train(model, kind(model, specs=specs_of(parts), **settings), range(STEPS))
    return weights(model)


def runs(place: Place, methods: list[str], replicas: int, bias: bool) -> dict[str, Weights]:
    found = {}
    replica = place.rank // (place.size // replicas)
    for method in methods:
        kind, settings = METHODS[method]
        model = divided(Net(bias=bias), replicas)
        optimizer = kind(model, **settings)
        train(model, optimizer, range(STEPS), replicas, replica)
        found[method] = weights(model)
    return found


@pytest.mark.parametrize(
    ("size", "replicas", "methods"),
    [
        (2, 1, ["GoMuon", "K=1", "blocks", "int8", "Muon"]),
        (4, 1, ["GoMuon"]),
        (4, 2, ["GoMuon", "K=1", "blocks", "Muon"]),
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
        assert distance(ranks[0], alone(method, size // replicas)) < 1e-9, method
