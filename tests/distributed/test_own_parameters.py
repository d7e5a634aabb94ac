"""Expert parallelism: parameters that only one rank has, beside those that ranks share."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gomuon import KFAC, Adaptive, GoMuon, LayerSpec
from gomuon.distributed.own_parameters import first_on_two_ranks
from gomuon.errors import NonFiniteGradientError, RankError
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.sharding import full_tensor
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, weights
from tests.methods.table import make

STEPS, ROWS, WIDTH, RANKS = 20, 8, 6, 2
IGNORES = pytest.mark.skipif(
    "ignored_params" not in inspect.signature(fully_shard).parameters,
    reason=f"fully_shard of torch {torch.__version__} ignores no parameters",
)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GoMuon": ("GoMuon", {"stagger": False}),
    "turns": ("GoMuon", {"refresh_every": 1, "weight_decay": 0.1}),
    "adapts": ("GoMuon", {"refresh_every": Adaptive(0.97, most=8), "stagger": False}),
    "KFAC": ("KFAC", {}),  # a budget over all layers; joins biases
    "Muon": ("Muon", {}),
}


class Gathered(torch.autograd.Function):
    """The rows of all ranks; their gradients add up at the rank they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()]


class Returned(torch.autograd.Function):
    """The sum of all ranks' rows, at the rank they came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class Copied(torch.autograd.Function):
    """Rows that all ranks have; their gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g


class Summed(torch.autograd.Function):
    """The sum of all ranks' rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Mixture(nn.Module):
    """A mixture of two experts between layers that all ranks share.

    `ways` bring rows to the experts and back.
    """

    ways: Any = (Gathered, Returned)

    def __init__(self, here: tuple[int, ...] = (0, 1), *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, RANKS)
        every = [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in "ab"]
        self.experts = nn.ModuleDict({str(i): every[i] for i in here})
        self.after, self.head = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        rows, share = x, self.gate(x).softmax(-1)
        divides = len(self.experts) < RANKS
        if divides:
            rows, share = self.ways[0].apply(rows), self.ways[0].apply(share)
        mixed: Any = sum(
            expert(rows) * share[..., int(i) : int(i) + 1] for i, expert in self.experts.items()
        )
        mixed = self.ways[1].apply(mixed) if divides else mixed
        found: Tensor = self.head(torch.tanh(self.after(x + mixed)))
        return found

    def of_experts(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self.named_parameters() if n.startswith("experts."))


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def wrapped(model: Mixture, kind: str) -> nn.Module:
    if kind == "ddp":
        names = [name for name, _ in model.of_experts()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params={p for _, p in model.of_experts()})
    return model


def train(
    model: nn.Module, optimizer: MatrixOptimizer, steps: range, kind: str = "alone", rank: int = 0
) -> None:
    inner: Any = model.module if kind == "ddp" else model
    ranks = 1 if kind == "alone" else RANKS
    for step in steps:
        optimizer.zero_grad()
        (model(inputs(step).chunk(ranks)[rank]).square().sum() * ranks / ROWS).backward()
        for name, p in inner.named_parameters() if ranks > 1 else ():
            assert p.grad is not None
            if name.startswith("experts."):
                p.grad /= ranks  # the loss is the mean of the ranks' losses
            elif kind == "loop":
                dist.all_reduce(p.grad)
                p.grad /= ranks
        optimizer.step()


def alone(method: str, steps: range = range(STEPS)) -> Weights:
    name, settings = METHODS[method]
    model = Mixture()
    train(model, make(name, model, **settings), steps)
    return weights(model)


def of_kind(kind: str) -> dict[str, Any]:
    """What the optimizer must be told."""
    if kind != "loop":
        return {}
    return {"work": "shared", "specs": {"experts.*": LayerSpec(ranks="own")}}


def whole(model: Any) -> Weights:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: full_tensor(p).detach().clone() for name, p in inner.named_parameters()}


def runs(place: Place, kind: str, methods: list[str], settings: dict[str, Any]) -> list[Any]:
    found = []
    for method in methods:
        name, own = METHODS[method]
        inner = Mixture((place.rank,))
        model = wrapped(inner, kind)
        optimizer = make(name, model, **own, **of_kind(kind), **settings)
        train(model, optimizer, range(STEPS), kind, place.rank)
        owners = {} if settings else optimizer.owners()
        assert not any("experts" in name for name in owners)
        assert settings or set(owners.values()) == {0, 1}
        table = str(optimizer.routing_table()).splitlines()
        found.append(
            (whole(model), [line.split()[0] for line in table if "this rank's own" in line])
        )
    return found


@pytest.mark.parametrize(
    ("kind", "methods", "settings"),
    [
        ("ddp", list(METHODS), {}),
        pytest.param("fsdp", ["GoMuon", "KFAC", "Muon"], {}, marks=IGNORES),
        ("loop", ["GoMuon", "KFAC"], {}),
        ("ddp", ["GoMuon"], {"work": "replicated"}),
    ],
    ids=["ddp", "fsdp", "loop", "replicated"],
)
def test_experts_on_ranks_equal_a_process_that_has_all(
    kind: str, methods: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    answers = launch(RANKS, runs, tmp_path, kind=kind, methods=methods, settings=settings)
    for place, method in enumerate(methods):
        expected = alone(method)
        shared = []
        for rank, answer in enumerate(answers):
            found, own = answer[place]
            experts = [name for name in found if name.startswith("experts.")]
            assert own == experts
            assert {name.split(".")[1] for name in experts} == {str(rank)}
            assert distance(found, {name: expected[name] for name in found}) < 1e-9, method
            shared.append({name: found[name] for name in found if name not in experts})
        assert_alike(shared)


def beside_divided_layers(place: Place, tensor_parallel: str) -> Weights:
    """Experts on the ranks that divide the other layers. All ranks have the same rows."""
    model = Mixture((place.rank,), bias=False)  # a row-parallel layer's does not join its blocks
    model.ways = (Copied, Summed)
    plan = {
        "before": ColwiseParallel(output_layouts=Replicate()),
        "after": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (place.size,)), plan)
    specs = {"experts.*": LayerSpec(ranks="own")}
    optimizer = KFAC(model, specs=specs, tensor_parallel=tensor_parallel)
    train(model, optimizer, range(STEPS))
    return whole(model)


@pytest.mark.parametrize("tensor_parallel", ["exact", "blocks"])
def test_experts_beside_divided_layers(tensor_parallel: str, tmp_path: Path) -> None:
    """By K-FAC, whose budget counts every layer once."""
    answers = launch(RANKS, beside_divided_layers, tmp_path, tensor_parallel=tensor_parallel)
    model = Mixture(bias=False)
    cut = {"before.weight": LayerSpec(heads=2), "after.weight": LayerSpec(input_heads=2)}
    train(model, KFAC(model, specs=cut if tensor_parallel == "blocks" else None), range(STEPS))
    expected = weights(model)
    for found in answers:
        assert distance(found, {name: expected[name] for name in found}) < 1e-9


# ---- state ---------------------------------------------------------------------------------------


def resumed(place: Place, kind: str) -> tuple[Weights, Weights, str]:
    model = wrapped(Mixture((place.rank,)), kind)
    optimizer = GoMuon(model)
    train(model, optimizer, range(6), kind, place.rank)
    other = wrapped(Mixture((place.rank,)), kind)
    other.load_state_dict(model.state_dict())
    again = GoMuon(other)
    again.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (other, again)):
        train(one, its, range(6, 12), kind, place.rank)
    with pytest.raises(ValueError, match="there is no whole state") as refused:
        optimizer.consolidated_state_dict()
    return whole(model), whole(other), str(refused.value)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=IGNORES)])
@pytest.mark.filterwarnings("ignore::gomuon.errors.GeometryWarning")
def test_a_ranks_state_dict_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    for one, other, refused in launch(RANKS, resumed, tmp_path, kind=kind):
        assert_alike([one, other])
        assert refused.startswith("rank 0 has parameters that no other rank has")


# ---- faults --------------------------------------------------------------------------------------


def failing(place: Place) -> list[str]:
    """A gradient that one rank's expert cannot use; then a rank fails after its expert is done."""
    inner = Mixture((place.rank,))
    model = wrapped(inner, "ddp")
    optimizer = GoMuon(model)
    before = weights(inner)
    model(inputs(0).chunk(RANKS)[place.rank]).square().sum().backward()
    own = next(p for _, p in inner.of_experts())
    assert own.grad is not None
    kept = own.grad.clone()
    if place.rank == 1:
        own.grad.fill_(torch.nan)
    with pytest.raises(NonFiniteGradientError) as first:
        optimizer.step()
    own.grad.copy_(kept)

    def fail(*_: Any) -> None:
        raise ArithmeticError("afterwards")

    geometry = type(optimizer._step.recipe.geometry)
    with pytest.MonkeyPatch.context() as patch:
        if place.rank == 1:
            patch.setattr(geometry, "after", fail)
            patch.setattr(geometry, "acts_after", True)
        with pytest.raises((ArithmeticError, RankError)) as second:
            optimizer.step()
    assert_alike([before, weights(inner)])
    optimizer.step()
    assert distance(before, weights(inner)) > 0
    return [str(first.value), f"{type(second.value).__name__}: {second.value}"]


def test_experts_stay_where_they_are_if_a_rank_fails(tmp_path: Path) -> None:
    one, other = launch(RANKS, failing, tmp_path)
    assert one[0].startswith("on rank 1, the gradient of 'experts.1.0.weight' holds NaN")
    assert one[1].startswith("RankError: rank 1 failed in the optimizer's step")
    assert other[1].startswith("ArithmeticError: afterwards")


def refusals(place: Place) -> dict[str, str]:
    def message(change: Callable[[], Any]) -> str:
        with pytest.raises((ValueError, RankError)) as raised:
            change()
        return str(raised.value)

    def step(model: nn.Module, **settings: Any) -> None:
        optimizer = GoMuon(model, **settings)
        model(inputs(0).chunk(RANKS)[place.rank]).square().sum().backward()
        optimizer.step()

    def value() -> None:
        GoMuon(Mixture(), specs={"experts.*": LayerSpec(ranks="mine")})

    def unsaid() -> None:
        """Experts of a model without a wrapper, and nothing is said of them."""
        step(Mixture((place.rank,)), work="shared")

    def averaged() -> None:
        """All ranks have the weight that the wrapper ignores, and average its gradient."""
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        outer = DistributedDataParallel(model)
        optimizer = GoMuon(outer)
        outer(inputs(0).chunk(RANKS)[place.rank]).square().sum().backward()
        assert model[0].weight.grad is not None
        dist.all_reduce(model[0].weight.grad)
        optimizer.step()

    def lonely() -> None:
        """A group of one rank's matrices alone."""
        model = wrapped(Mixture((place.rank,)), "ddp")
        optimizer = GoMuon(
            model,
            routes={"before.weight": "adamw", "after.weight": "adamw", "gate.weight": "adamw"},
        )
        model(inputs(0).chunk(RANKS)[place.rank]).square().sum().backward()
        optimizer.step()

    def divided() -> None:
        """A weight of which torch itself knows who has it."""
        plan: dict[str, ParallelStyle] = {"before": ColwiseParallel(output_layouts=Replicate())}
        model = parallelize_module(Mixture(), init_device_mesh("cpu", (place.size,)), plan)
        GoMuon(model, specs={"before.*": LayerSpec(ranks="own")})

    torch.manual_seed(0)
    changes = (value, unsaid, averaged, lonely, divided)
    return {change.__name__: message(change) for change in changes}


def test_what_is_refused(tmp_path: Path) -> None:
    for found in launch(RANKS, refusals, tmp_path):
        assert 'must be None, "own" or "shared", got \'mine\'' in found["value"]
        assert "ranks differ in parameter 'experts." in found["unsaid"]
        assert 'LayerSpec(ranks="own")' in found["unsaid"]
        assert "equal weights and equal gradients of '0.weight'" in found["averaged"]
        assert 'LayerSpec(ranks="shared")' in found["averaged"]
        assert "put both into one group" in found["lonely"]
        assert "it is a DTensor, and torch knows which ranks have it" in found["divided"]


def test_experts_of_two_ranks_are_told_from_copies() -> None:
    copy = {"a": (3.0, 1.0, 2.0, 0.5)}
    assert first_on_two_ranks([copy, {"b": copy["a"]}, {"a": (3.0, 1.0, 2.0, 0.6)}]) is None
    told = first_on_two_ranks([copy, {}, {"a": (3.0001, 1.0, 2.0, 0.5)}])
    assert told is not None
    assert told.startswith("ranks 0 and 2 have equal weights and equal gradients of 'a'")
    without = {"a": (3.0, 1.0, 0.0, 0.0)}  # no row reached either expert
    assert first_on_two_ranks([without, without]) is None
