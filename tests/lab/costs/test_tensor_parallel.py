"""`gomuon plan --tensor-parallel`: its figures against counters of real steps on several ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

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
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from gomuon.capture import tap
from gomuon.distributed.owned import OwnedMatrix
from gomuon.distributed.owners import Owners
from gomuon.lab.costs import planned_model
from gomuon.lab.costs.cycle import Spread
from gomuon.lab.costs.estimate import CostEstimate, RankLayout, estimate_cost
from gomuon.lab.costs.fitting import Need, need_of
from gomuon.lab.costs.planned_model import PlannedModel
from gomuon.lab.costs.published_models import GPT2, Llama, gpt2_division, llama_division
from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.lab.costs.tensor_plan import TensorPlan, divided_layers
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.experiments import optimizers
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.sharding import local
from gomuon.recipes.recipe import Recipe
from tests.counting import kept_bytes
from tests.distributed.launcher import Place, launch
from tests.distributed.test_streaming import held
from tests.distributed.test_traffic import counted

SYMBOLS, LENGTH, BATCH = 32, 10, 3
STEPS = 4
PLAN = llama_division(2)


def llama() -> nn.Module:
    """Two heads of keys, four of queries; everything is divided by two."""
    torch.manual_seed(0)
    return Llama(SYMBOLS, 16, 1, 4, 2, 24)


def gpt2() -> nn.Module:
    """Fused attention, biases, and a head tied to the embedding; cut smaller than published."""
    torch.manual_seed(0)
    model = GPT2(16, 1, 2)
    model.wte, model.wpe = nn.Embedding(SYMBOLS, 16), nn.Embedding(LENGTH, 16)
    return model


MODELS = {"llama": (llama, PLAN), "gpt2": (gpt2, gpt2_division(2))}


class Case:
    """What is trained and planned: a model, a method, its settings, and how layers are divided."""

    def __init__(
        self,
        model: str,
        method: str,
        mode: str = "blocks",
        *,
        shared: bool = False,
        replicate: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.method, self.mode = model, method, mode
        self.shared, self.replicate = shared, replicate
        given = {"polar": "svd", "refresh_every": 2, **settings}
        self.settings = {key: x for key, x in given.items() if key in self.recipe.settings}

    def __repr__(self) -> str:
        shown = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.model} {self.method} {self.mode}{' shared' * self.shared} {shown}"

    @property
    def recipe(self) -> Recipe:
        entry = optimizers.find(self.method)
        assert entry is not None
        return entry.recipe

    @property
    def observes_every(self) -> int:
        """The steps between two captures of a layer."""
        clock, chosen = self.recipe.clock, {**self.recipe.defaults, **self.settings}
        if clock.statistics is None:
            return 1
        every: int = chosen[clock.statistics] or chosen[str(clock.maps)]
        return every

    def plan(self, parts: int) -> TensorPlan:
        """Two ranks divide everything, four only the MLP, because there are two heads."""
        usual = replace(MODELS[self.model][1], shares_inputs=self.shared)
        return usual if parts == 2 else TensorPlan(("*.gate", "*.up"), ("*.down",))


def styles(model: nn.Module, plan: TensorPlan) -> dict[str, ParallelStyle]:
    """The plan as `parallelize_module` takes it."""
    found: dict[str, ParallelStyle] = {}
    for name, style in divided_layers("the model", model, plan).items():
        if style == "colwise":
            found[name] = ColwiseParallel(output_layouts=Replicate() if name == "lm_head" else None)
        else:
            embeds = name == "embed_tokens"
            found[name] = RowwiseParallel(input_layouts=Replicate() if embeds else None)
    if plan.shares_inputs:
        for name in dict(model.named_modules()):
            if name.endswith(".self_attn"):  # the second argument are the rotary tables
                found[name] = PrepareModuleInput(
                    input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
                )
            elif name.endswith(".mlp"):
                found[name] = PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Replicate()
                )
    return found


def divided(case: Case, mesh: Mesh) -> tuple[nn.Module, Any]:
    """The model on this rank, and the group of the ranks with the same parts."""
    build, _ = MODELS[case.model]
    model = build().double()
    sizes = mesh.replicas * mesh.shards, mesh.parts
    ranks = init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "parts"))
    parallelize_module(model, ranks["parts"], styles(model, case.plan(mesh.parts)))
    if mesh.shards > 1:
        fully_shard(model, mesh=ranks["rows"])
    return model, ranks.get_group("rows")


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(tokens(step)).logsumexp(-1).mean()


@contextmanager
def formed() -> Iterator[list[int]]:
    """Bytes of the sums that are formed from here on."""
    sizes = [0]
    real = tap.moment

    def moment(*given: Any) -> Tensor:
        total = real(*given)
        sizes[0] += total.nbytes
        return total

    with mock.patch.object(tap, "moment", moment):
        yield sizes


@contextmanager
def on_their_way() -> Iterator[list[int]]:
    """Bytes that a rank holds while steps are sent: buffers, steps, and what was collected."""
    sizes = [0]
    real = Owners.send

    def send(self: Owners, matrices: Sequence[OwnedMatrix]) -> None:
        real(self, matrices)
        exchange: Any = self._sent[-1][1]
        sizes[0] += exchange._sent.nbytes + exchange._buffer.nbytes
        collects = any(ranges.sharded for matrix in matrices for ranges in matrix.row_ranges)
        for layer in (matrix.layer for matrix in matrices if matrix.layer is not None):
            sizes[0] += sum(step.nbytes for step in layer.steps)
            collected = [*layer.whole_gradients, *layer.whole_weights] if collects else []
            sizes[0] += sum(tensor.nbytes for tensor in collected)

    with mock.patch.object(Owners, "send", send):
        yield sizes


def flops_of(action: Callable[[], Any]) -> int:
    with OperationRecorder() as record:
        action()
    return sum(operation.flops for operation in record.operations)


Figures = dict[str, Any]


def figures(place: Place, cases: list[Case], mesh: Mesh) -> list[Figures]:
    """FLOPs, bytes sent and bytes of sums of each step; bytes of state, and of what is on its way.

    Sums that are held at one time are looked at whenever some are delivered.
    """
    return [figures_of(place, case, mesh) for case in cases]


def figures_of(place: Place, case: Case, mesh: Mesh) -> Figures:
    model, group = divided(case, mesh)
    # The first time DTensor also tries operators out.
    plain = [flops_of(loss_of(model, 0).backward) for _ in range(2)][-1]
    model.zero_grad()
    options = {**case.settings, "tensor_parallel": case.mode}
    if mesh.replicas > 1:  # their gradients are equal already, as if a loop had averaged them
        options["process_group"] = dist.group.WORLD if case.mode == "exact" else group
        options |= {"work": "replicated"} if case.replicate else {}
    optimizer = optimizers.build(case.method, model, 1e-3, 1e-3, options)
    assert isinstance(optimizer, MatrixOptimizer)
    found: Figures = {"work": [], "sent": [], "sums": [], "messages": 0, "held": 0}

    def look(*_: Any) -> None:
        stream = getattr(optimizer._team(), "_stream", None)
        here = held(optimizer)
        if stream is not None:
            here += stream.bytes_in_flight + sum(t.nbytes for t in stream._totals.values())
        found["held"] = max(found["held"], here)

    for capture in optimizer._capture.groups:
        for hooks in capture._hooks.values():
            hooks[0].gradients.total.register_post_accumulate_grad_hook(look)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 0:  # ranks are compared
            loss.backward()
            optimizer.step()
            continue
        with counted(place) as bytes_sent, formed() as sizes, on_their_way() as messages:
            own = flops_of(loss.backward) - plain
            own += flops_of(optimizer.step)
        found["work"].append(own)
        found["sent"].append(bytes_sent[0])
        found["sums"].append(sizes[0])
        found["messages"] = messages[0]
    weights = sum(local(p.detach()).nbytes for p in model.parameters())
    return {**found, "state": kept_bytes(optimizer), "weights": weights}


@cache
def about(model: str) -> PlannedModel:
    path = f"tests.lab.costs.test_tensor_parallel:{model}"
    return planned_model.users_model(path, f"1,{LENGTH}", BATCH * LENGTH, "float64")


def planned(case: Case, mesh: Mesh) -> tuple[CostEstimate, Need]:
    model = about(case.model).divided(case.plan(mesh.parts), mesh.parts)
    ranks = RankLayout(mesh, case.replicate, exact=case.mode == "exact")
    cost = estimate_cost(case.method, model, ranks, case.settings)
    return cost, need_of(model, ranks, cost, reserve=0)


def assert_planned(answers: list[list[Figures]], cases: list[Case], mesh: Mesh) -> None:
    """To the FLOP and the byte, for the busiest rank and on average, step by step."""
    for index, case in enumerate(cases):
        (cost, need), ranks = planned(case, mesh), [answer[index] for answer in answers]

        def agrees(real: list[float], figure: Spread, *what: object) -> None:
            # What sums over a ring send is rounded.
            assert max(real) == pytest.approx(figure.largest, abs=1), what
            assert sum(real) / len(real) == pytest.approx(figure.mean, abs=1), what

        for step in range(1, STEPS):
            expected = cost.cycle[step % len(cost.cycle)]
            for key, figure in (("work", expected.work), ("sent", expected.sent)):
                agrees([rank[key][step - 1] for rank in ranks], figure, case, key, step)
        for key, figure in (("state", cost.state), ("messages", cost.messages)):
            agrees([rank[key] for rank in ranks], figure, case, key)
        assert need.weights == need.gradients == max(rank["weights"] for rank in ranks), case
        for rank in ranks:
            cycle = rank["sums"][-len(cost.cycle) :]
            assert sum(cycle) * case.observes_every == len(cycle) * cost.moments, case
            assert rank["held"] <= cost.held, case


@pytest.mark.parametrize(
    "cases",
    [
        [
            Case("llama", "go-muon"),
            Case("llama", "go-muon", stagger=True, block_size=5, state_dtype="int8"),
            Case("llama", "go-muon", rows=11, input_decay=0.9, shared=True),
            Case("gpt2", "kfac", statistics_every=2),
            Case("gpt2", "newton-muon"),
            Case("llama", "soap"),
        ],
        [
            Case("llama", "go-muon", "exact"),
            Case("llama", "go-muon", "exact", stagger=False, rows=11, input_decay=0.9),
            Case("llama", "go-muon", "exact", block_size=5, shared=True, sums_dtype="bfloat16"),
            Case("gpt2", "kfac", "exact", statistics_every=2),
            Case("gpt2", "go-muon", "exact", max_side=20, long_sides="diagonal"),
            Case("llama", "shampoo", "exact"),
        ],
    ],
    ids=["blocks", "exact"],
)
def test_figures_of_divided_layers_are_the_plans(cases: list[Case], tmp_path: Path) -> None:
    mesh = Mesh(parts=2)
    assert_planned(launch(2, figures, tmp_path, cases=cases, mesh=mesh), cases, mesh)


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        (
            Mesh(shards=2, parts=2),
            [
                Case("llama", "go-muon"),
                Case("gpt2", "kfac"),
                Case("llama", "go-muon", "exact", geometry_decay=True),
                Case("gpt2", "kfac", "exact"),
            ],
        ),
        (
            Mesh(replicas=2, parts=2),
            [
                Case("llama", "go-muon"),
                Case("llama", "go-muon", replicate=True),
                Case("gpt2", "go-muon", "exact"),
            ],
        ),
        (Mesh(parts=4), [Case("llama", "go-muon"), Case("llama", "kfac", "exact")]),
    ],
    ids=["fully_shard", "replicas", "four parts"],
)
def test_figures_of_four_ranks_are_the_plans(mesh: Mesh, cases: list[Case], tmp_path: Path) -> None:
    assert_planned(launch(4, figures, tmp_path, cases=cases, mesh=mesh), cases, mesh)


# ---- the model itself ----------------------------------------------------------------------------


def forward_and_backward(model: nn.Module) -> None:
    loss_of(model, 0).backward()


def model_flops(place: Place, mesh: Mesh) -> list[tuple[int, int]]:
    """FLOPs of forward and backward on this rank, and its parameters."""
    found = []
    for name in MODELS:
        model, _ = divided(Case(name, "muon"), mesh)
        with sdpa_kernel(SDPBackend.MATH):  # the fused one has no formula in torch's counter
            pass_of = partial(forward_and_backward, model)
            flops = [flops_of(pass_of) for _ in range(2)][-1]
        found.append((flops, sum(local(p).numel() for p in model.parameters())))
    return found


def test_a_rank_has_its_part_of_the_models_work_and_parameters(tmp_path: Path) -> None:
    for answer in launch(2, model_flops, tmp_path, mesh=Mesh(parts=2)):
        for (flops, parameters), (name, (_, plan)) in zip(answer, MODELS.items(), strict=True):
            model = about(name).divided(plan, 2)
            assert flops == model.model_flops < about(name).model_flops
            assert parameters == model.held_parameters < about(name).parameters
