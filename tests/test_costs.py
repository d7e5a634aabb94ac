"""The cost model against what the optimizers really multiply, decompose and keep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon import LayerSpec
from gomuon.functional import polar
from gomuon.functional.linalg import symmetric_product, working_dtype
from gomuon.functional.polar_factor import PolarMethod
from gomuon.lab.costs.footprint import adamw_bytes, unit_elements
from gomuon.lab.costs.inventory import Inventory, inventory, readings
from gomuon.lab.costs.work import (
    METHODS,
    map_work,
    moment_work,
    statistics_work,
    step_work,
    units_of,
)
from gomuon.methods.work import Product, Work, flops, polar_work, symmetric
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from tests.counting import counted, kept_bytes, predicted
from tests.models import language_loss, transformer

Model = Callable[[], nn.Module]
Specs = Mapping[str, LayerSpec]
BATCH, LENGTH = 6, 10


@dataclass(frozen=True)
class Case:
    """A model, one input for it, and how its weights are cut."""

    build: Model
    x: Tensor
    specs: Specs = field(default_factory=dict)


def _transformer(dtype: torch.dtype = torch.float64) -> nn.Module:
    return transformer(dtype=dtype, layers=1)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 18), nn.Tanh(),
                         nn.Linear(18, 4))  # fmt: skip


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 3)
    )


HEADS = {"*.attention.[qkv].weight": LayerSpec(heads=2), "*.o.weight": LayerSpec(input_heads=2)}
SYMBOL_ROWS = torch.zeros(BATCH, LENGTH, dtype=torch.long)
# In float32 only what is well-conditioned: the polar factor of other matrices is polished, by as
# many products as it needs.
CASES = {
    "transformer": Case(_transformer, SYMBOL_ROWS),
    "float32": Case(lambda: _transformer(torch.float32), SYMBOL_ROWS),
    "heads": Case(_transformer, SYMBOL_ROWS, HEADS),
    "mlp": Case(lambda: _mlp().double(), torch.randn(9, 20).double()),
    "conv": Case(lambda: _convolutions().double(), torch.randn(5, 2, 8, 8).double()),
}  # fmt: skip
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {"polar": "svd", "refresh_every": 2}),
    ("GoMuon", {"polar": "polar-express", "refresh_every": 2}),
    (
        "GoMuon",
        {"polar": "svd", "refresh_every": 2, "alpha": (0.0, 0.25), "input_decay": 0.9},
    ),
    ("Muon", {"polar": "svd"}),
    ("Muon", {"polar": "polar-express"}),
    ("Shampoo", {"refresh_every": 2}),
    ("Shampoo", {"refresh_every": 2, "block_size": 10, "graft": "sgd"}),
    ("KFAC", {"refresh_every": 2}),
]


def loss_of(model: nn.Module, case: Case, step: int) -> Tensor:
    if case.x.dtype == torch.long:
        return language_loss(model, step, BATCH)
    loss: Tensor = model(case.x).square().mean()
    return loss


def prepared(
    name: str, settings: dict[str, Any], case: Case
) -> tuple[nn.Module, MatrixOptimizer, dict[str, Any], Inventory]:
    model = case.build()
    kind: type[MatrixOptimizer] = getattr(gomuon, name)
    optimizer = kind(model, specs=case.specs, **settings)
    whole = {**kind.recipe.defaults, **settings}
    with torch.device("meta"):
        ghost = case.build()
        shared = readings(ghost, case.x.to("meta"))
    return model, optimizer, whole, inventory(ghost, kind.recipe, whole, shared, specs=case.specs)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_every_operation_and_every_byte_is_predicted(
    name: str, settings: dict[str, Any], case: Case
) -> None:
    model, optimizer, whole, found = prepared(name, settings, case)
    units = units_of(found.layers, name)
    stacks: set[Stack] = set()
    optimizer.add_observer(lambda stack, *_: stacks.add(stack))
    backward_alone: int | None = None
    every, statistics = whole.get("refresh_every", 1), whole.get("statistics_every")
    for step in range(2 * every):
        refresh = step % every == 0
        loss = loss_of(model, case, step)
        optimizer.zero_grad()
        products, calls = counted(loss.backward)
        moments: Work = []
        if METHODS[name].captures and (step % (statistics or every) == 0):
            for unit in units:
                moments += moment_work(unit, name, whole)
        extra, _ = predicted(moments)
        # The backward pass itself costs the same every time.
        backward_alone = products - extra if backward_alone is None else backward_alone
        assert (products - extra, not calls) == (backward_alone, True)

        work = [op for unit in units for op in step_work(unit, name, whole)]
        work += [op for unit in units for op in statistics_work(unit, name, whole)]
        if refresh:
            work += [op for unit in units for op in map_work(unit, name, whole)]
        assert counted(optimizer.step) == predicted(work)

    size = working_dtype(next(model.parameters())).itemsize
    kept = size * sum(unit_elements(unit, name, whole) for unit in units)
    kept += adamw_bytes([rows * width for rows, width in found.others], size)
    assert kept_bytes(optimizer, stacks) == kept


def test_backward_without_capture_is_what_is_left_over() -> None:
    """The first test subtracts moments from a backward pass; this is that pass without any."""
    case = CASES["transformer"]
    model, _, whole, found = prepared("GoMuon", {}, case)
    products, _ = counted(loss_of(model, case, 0).backward)
    plain, _ = counted(loss_of(_transformer(), case, 0).backward)
    units = units_of(found.layers, "GoMuon")
    moments = [op for u in units for op in moment_work(u, "GoMuon", whole)]
    assert products - plain == flops(moments) > 0


def test_queries_keys_and_values_are_one_unit_and_so_are_gate_and_up() -> None:
    *_, found = prepared("GoMuon", {}, CASES["transformer"])
    units = [[layer.name.split(".")[-2] for layer in u] for u in units_of(found.layers, "GoMuon")]
    assert units == [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]
    assert all(len(unit) == 1 for unit in units_of(found.layers, "Muon"))


def test_without_a_forward_pass_nothing_is_shared() -> None:
    recipe = gomuon.GoMuon.recipe
    found = inventory(transformer(), recipe, recipe.defaults)
    assert all(len(unit) == 1 for unit in units_of(found.layers, "GoMuon"))


def test_a_weight_no_forward_pass_reaches_has_no_moments() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.used(x))
            return out

    model, recipe = Idle(), gomuon.GoMuon.recipe
    found = inventory(model, recipe, recipe.defaults, readings(model, torch.randn(3, 4)))
    moments = {x.name: moment_work([x], "GoMuon", recipe.defaults, 2.0) for x in found.layers}
    assert moments["idle.weight"] == []
    assert moments["used.weight"] == [Product(1, 6, 6, 6), Product(1, 4, 6, 4)]


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("method", sorted({*get_args(PolarMethod)} - {"auto"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_polar_factor_alone(shape: tuple[int, int], method: Any, dtype: torch.dtype) -> None:
    X = torch.randn(3, *shape).to(dtype)
    work = polar_work(3, *shape, method, float64=dtype == torch.float64)
    assert counted(lambda: polar(X, method)) == predicted(work)


@pytest.mark.parametrize("d", [1, 16, 255, 256, 300, 2100])
def test_symmetric_products_alone(d: int) -> None:
    rows = torch.ones(2, 3, d)
    assert counted(lambda: symmetric_product(rows)) == predicted(symmetric(2, d, 3))


def test_parameters_by_treatment_are_the_optimizers_own() -> None:
    *_, optimizer, _, found = prepared("KFAC", {}, CASES["mlp"])
    assert [(r.name, r.treatment) for r in found.table] == [
        (r.name, r.treatment) for r in optimizer.routing_table()
    ]
    assert sum(rows * width for layer in found.layers for rows, width in layer.tensors) == sum(
        r.parameter.numel() for r in found.table.treated("matrix")
    )
