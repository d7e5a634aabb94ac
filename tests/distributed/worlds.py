"""Models on several ranks: wrapped, trained on each rank's share of a batch, read back whole."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.sharding import full_tensor
from tests.distributed.launcher import Place
from tests.models import tokens, transformer

# Sequences of each rank, by number of ranks; the union is the same nine.
SHARES = {1: (9,), 2: (3, 6), 4: (1, 2, 2, 4)}
UNION = 9
Weights = dict[str, Tensor]


def mesh_of(kind: str, size: int) -> DeviceMesh:
    if kind == "hybrid":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (size,))


def wrapped(model: nn.Module, kind: str, **options: Any) -> nn.Module:
    """The model for these ranks: "alone", "ddp", "fsdp" or "hybrid"."""
    if kind == "alone":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = mesh_of(kind, dist.get_world_size())
    for block in blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if parent and last.isdigit():
            yield module


def language_loss(model: nn.Module, window: Tensor, tokens_in_all: int, ranks: int) -> Tensor:
    """This rank's part of the mean over all ranks' tokens, which gradients are averaged over."""
    logits = model(window[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
    return ranks * total / tokens_in_all


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, place: Place | None = None
) -> None:
    """On the union batch, or on this place's share of it."""
    for step in steps:
        window = tokens(step, UNION)
        in_all = window[:, 1:].numel()
        mine = window if place is None else window[place.share(SHARES[place.size])]
        optimizer.zero_grad()
        language_loss(model, mine, in_all, 1 if place is None else place.size).backward()
        optimizer.step()


def weights(model: nn.Module) -> Weights:
    """Whole and without the wrapper's prefix; a message where they are sharded."""
    return {
        name.removeprefix("module."): full_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
    }


def run(
    place: Place | None,
    kind: str,
    make: Callable[[nn.Module], MatrixOptimizer],
    steps: int,
    build: Callable[[], nn.Module] = transformer,
) -> Weights:
    model = wrapped(build(), kind)
    train(model, make(model), range(steps), place)
    return weights(model)


def distance(one: Weights, other: Weights) -> float:
    """The largest relative difference of a tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-30))
        for name in one
    )


def assert_alike(answers: list[Weights]) -> None:
    """Bit for bit."""
    for other in answers[1:]:
        for name, tensor in answers[0].items():
            assert torch.equal(tensor, other[name]), f"{name}: the ranks differ"
