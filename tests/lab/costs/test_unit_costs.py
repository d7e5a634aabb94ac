"""The costs every method states, against what its step really multiplies, decomposes and keeps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from gomuon import Adaptive, GoMuon, LayerSpec, Rotated
from gomuon.functional import polar, polar_express
from gomuon.functional.linalg import symmetric_product, working_dtype
from gomuon.functional.polar_factor import PolarMethod
from gomuon.geometry import rotating_basis
from gomuon.lab.costs.input_uses import find_input_uses
from gomuon.lab.costs.matrix_layers import MatrixLayer, ModelLayers, find_layers, units_of
from gomuon.lab.costs.state_bytes import state_bytes
from gomuon.lab.costs.unit_costs import (
    adamw_bytes,
    layers_work,
    moment_work,
    renewal_work,
    state_elements,
)
from gomuon.methods import kfac, soap
from gomuon.methods.go_muon import comparison_work
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.routing import Routes
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import METHODS
from gomuon.recipes.work import Product, StepWork, Work, flops, polar_work, symmetric
from tests.counting import counted, kept_bytes, predicted
from tests.models import language_loss, transformer

Model = Callable[[], nn.Module]
Specs = Mapping[str, LayerSpec]
BATCH, LENGTH = 6, 10


@dataclass(frozen=True)
class Case:
    """A model, one input for it, and how its weights are cut and treated."""

    build: Model
    x: Tensor
    specs: Specs = field(default_factory=dict)
    routes: Routes = None


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


@pytest.fixture(autouse=True)
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs are those of hardware that multiplies bfloat16; every processor can."""
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: True)


@pytest.fixture(autouse=True)
def few_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bases come from many equal steps, which take long to record."""
    for module in (kfac, soap, rotating_basis):
        monkeypatch.setattr(module, "FIRST_STEPS", 3)


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
# Settings that change what is computed or kept, beside each method's defaults.
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {"polar": "fast"}),
    ("GoMuon", {"alpha": (0.0, 0.25), "input_decay": 0.9}),
    ("GoMuon", {"geometry_decay": True}),
    ("GoMuon", {"rows": 7}),
    ("KFAC", {"rows": 20}),
    ("MatchedKFAC", {"rows": 4}),
    ("GoMuon", {"geometry_decay": True, "block_size": 7, "input_decay": 0.9}),
    ("GoMuon", {"block_size": 5, "max_side": 16}),
    ("GoMuon", {"geometry_decay": True, "max_side": 16, "long_sides": "diagonal"}),
    ("GoMuon", {"state_dtype": "bfloat16", "input_decay": 0.9}),
    ("GoMuon", {"state_dtype": "int8"}),
    ("GoMuon", {"state_dtype": "int8", "block_size": 7, "offload": True}),
    *((name, {"state_dtype": "int8"}) for name in METHODS if name != "GoMuon"),
    ("Muon", {"polar": "fast"}),
    ("Shampoo", {"block_size": 10, "graft": "sgd"}),
    ("Shampoo", {"statistics_every": 2, "refresh_every": 4}),
    ("KFAC", {"statistics_every": 2, "refresh_every": 4}),
    ("KFAC", {"block_size": 7}),
    ("KFAC", {"max_side": 16}),
    ("KFAC", {"max_side": 16, "long_sides": "diagonal"}),
    ("MatchedKFAC", {"reduce": False}),
    ("MatchedKFAC", {"block_size": 7}),
    ("MatchedKFAC", {"max_side": 16}),
    ("NewtonMuon", {"reduce": True}),
    ("NewtonMuon", {"block_size": 7}),
    ("SOAP", {"max_side": 16}),
    ("Dion", {"rank_fraction": 0.3}),
    ("PolarExpressMuon", {"polar_steps": 8}),
    ("KLSOAP", {"max_side": 16}),
    ("SOAPMuon", {"square_root": True}),
    ("QSD", {"steps": 2, "input_decay": 0.9}),
    ("QSD", {"block_size": 7}),
    ("SINGD", {"block_size": 7}),
    ("SINGD", {"max_side": 16, "long_sides": "diagonal"}),
    ("SINGD", {"max_side": 16}),
    ("Halfspace", {"tau": 1e-6}),
    ("Halfspace", {"block_size": 7}),
    ("GoMuon", {"roots": "products"}),
    ("GoMuon", {"roots": "products", "alpha": (0.5, 0.3), "max_condition": 100.0}),
    *(
        (name, {"roots": "products"})
        for name, kind in METHODS.items()
        if "roots" in kind.recipe.settings and name != "GoMuon"
    ),
]
# Other settings where a step is not the usual one, for the reason given; None leaves the case out.
UNUSUAL: dict[tuple[str, str], dict[str, Any] | None] = {
    # Sources so ill-conditioned that their exact polar factors are polished in float32.
    ("MALT", "float32"): {"polar": "fast"},
    ("KFACMuon", "float32"): {"polar": "fast"},
    ("AdaMuon", "float32"): {"polar": "fast"},
    ("Moonlight", "float32"): {"polar": "fast"},
    ("SOAPMuon", "float32"): {"polar": "fast"},
    ("QSD", "float32"): {"polar": "fast"},
    # Smoothness is measured in the first steps only.
    **{("Gluon", case): {"measure_steps": 0} for case in CASES},
    # Values are cut like queries and keys, stacked with them and multiplied by identities.
    ("MuonQK", "heads"): None,
    # There are no queries and keys.
    ("MuonQK", "mlp"): None,
    ("MuonQK", "conv"): None,
}


def steps_to_predict() -> list[Any]:
    """Every method, with its defaults and with `FURTHER` settings, on every case."""
    chosen = [
        (name, case, {**settings, **(UNUSUAL.get((name, case), {}) or {})})
        for name, settings in [*((name, {}) for name in METHODS), *FURTHER]
        for case in CASES
        if UNUSUAL.get((name, case), {}) is not None
    ]
    return [pytest.param(*step, id="-".join([step[0], *step[2], step[1]])) for step in chosen]


def short_clock(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a refresh every other step and the paper's polar factor.

    The first step refreshes: before there are maps, nothing is multiplied by them.
    """
    chosen = {"polar": "svd", "refresh_every": 2, "refresh_at": "first", **settings}
    return {name: value for name, value in chosen.items() if name in recipe.settings}


def loss_of(model: nn.Module, case: Case, step: int) -> Tensor:
    if case.x.dtype == torch.long:
        return language_loss(model, step, BATCH)
    loss: Tensor = model(case.x).square().mean()
    return loss


def prepared(
    name: str, settings: dict[str, Any], case: Case
) -> tuple[nn.Module, MatrixOptimizer, ModelLayers]:
    model = case.build()
    kind = METHODS[name]
    optimizer = kind(model, specs=case.specs, routes=case.routes, **settings)
    whole = {**kind.recipe.defaults, **settings}
    with torch.device("meta"):
        ghost = case.build()
        uses = find_input_uses(ghost, case.x.to("meta"))
    found = find_layers(ghost, kind.recipe, whole, uses, case.routes, case.specs)
    return model, optimizer, found


def work_of(name: str) -> StepWork:
    work = METHODS[name].recipe.work
    assert work is not None, f"{name} does not state its costs"
    return work


class SeenStacks:
    """Remembers the stacks that steps move."""

    def __init__(self, stacks: set[Stack]) -> None:
        self._stacks = stacks

    def before_refresh(self, *_: Any) -> None:
        """Nothing is seen before a refresh."""

    def updated(self, stack: Stack, *_: Any) -> None:
        """Remember a stack."""
        self._stacks.add(stack)


def every_unit(units: list[list[MatrixLayer]], part: Callable[..., Work], *args: Any) -> Work:
    return [operation for unit in units for operation in part(unit, *args)]


@pytest.mark.parametrize(("name", "on", "settings"), steps_to_predict())
def test_every_operation_and_every_byte_is_predicted(
    name: str, on: str, settings: dict[str, Any]
) -> None:
    check_every_operation_and_byte(name, CASES[on], settings)


def check_every_operation_and_byte(name: str, case: Case, settings: dict[str, Any]) -> None:
    """Of some steps of a method, with these settings, on a model."""
    recipe, work = METHODS[name].recipe, work_of(name)
    settings = short_clock(recipe, settings)
    model, optimizer, found = prepared(name, settings, case)
    units = units_of(found.layers)
    stacks: set[Stack] = set()
    optimizer._observe(SeenStacks(stacks))
    backward_alone: int | None = None
    group = {**recipe.defaults, **settings}
    for step in range(2 * group.get("refresh_every", 1) + 1):
        group["step"] = step
        loss = loss_of(model, case, step)
        optimizer.zero_grad()
        products, calls = counted(loss.backward)
        observes = recipe.clock.observes(group)
        extra, _ = predicted(every_unit(units, moment_work) if observes else [])
        # The backward pass itself costs the same every time.
        backward_alone = products - extra if backward_alone is None else backward_alone
        assert (products - extra, not calls) == (backward_alone, True)

        if step == 0 and work.first is not None:
            expected = every_unit(units, layers_work, work.first)
        else:
            expected = every_unit(units, layers_work, work.step)
            expected += every_unit(units, layers_work, work.observe) if observes else []
            if recipe.clock.renews(group):
                renew = partial(renewal_work, first=step == 0)
                expected += every_unit(units, renew, work)
        assert counted(optimizer.step) == predicted(expected)

    working = working_dtype(next(model.parameters()))
    size = working.itemsize
    if group["state_dtype"] is None:
        kept = size * sum(state_elements(unit, work) for unit in units)
    else:
        parts = [state_bytes(unit, recipe, work, working) for unit in units]
        kept = sum(part.device + part.host for part in parts)  # on the CPU nothing is offloaded
    kept += adamw_bytes([part.elements for part in found.others], size)
    assert kept_bytes(optimizer, stacks) == kept


def test_what_a_clock_that_adapts_compares_is_predicted() -> None:
    """In a refresh that replaces maps; the interval is the same, so nothing else differs."""
    case, counts = CASES["transformer"], []
    for every in (2, Adaptive(0.5, least=2, most=2)):
        settings = {"polar": "fast", "refresh_every": every}
        model, optimizer, found = prepared("GoMuon", settings, case)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, case, step).backward()
            counts.append(counted(optimizer.step))
    units = units_of(found.layers)
    assert counts[3:5] == counts[:2], "the first refresh compares nothing"
    expected = predicted(every_unit(units, layers_work, comparison_work))
    assert (counts[5][0] - counts[2][0], counts[5][1]) == (expected[0], counts[2][1])
    assert expected[0] > 0


@pytest.mark.parametrize("roots", ["eigh", "products"])
@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "Mousse", "KLShampoo"])
def test_looks_at_bases_and_their_renewal_are_predicted(name: str, roots: str) -> None:
    """If every look renews, as here, nothing is left out; the first step only makes the bases."""
    settings = {"refresh_every": Rotated(1e-12, every=2), "roots": roots, "polar": "svd"}
    recipe, work, case = METHODS[name].recipe, work_of(name), CASES["mlp"]
    settings = {key: value for key, value in settings.items() if key in recipe.settings}
    model, optimizer, found = prepared(name, settings, case)
    units = units_of(found.layers)
    group = {**recipe.defaults, **settings}
    for step in range(4):
        group["step"] = step
        optimizer.zero_grad()
        loss_of(model, case, step).backward()
        expected = every_unit(units, layers_work, work.step)
        expected += every_unit(units, layers_work, work.observe)
        if recipe.clock.renews(group):
            expected += every_unit(units, renewal_work, work)
        found_now = counted(optimizer.step)
        assert step == 0 or found_now == predicted(expected)
    kept = working_dtype(next(model.parameters())).itemsize
    kept *= sum(state_elements(unit, work) for unit in units)
    matrices = [p for p in model.parameters() if "momentum" in optimizer.state[p]]
    tensors = [v for p in matrices for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    assert kept == sum(v.numel() * v.element_size() for v in tensors)


@pytest.mark.parametrize("offload", [False, True, "maps"])
@pytest.mark.parametrize("form", [None, "bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", [name for name, kind in METHODS.items() if "offload" in kind.recipe.settings]
)
def test_what_is_offloaded_is_counted_on_the_host(name: str, form: Any, offload: Any) -> None:
    """Against the tensors of a real step, by the names that an accelerator would offload."""
    settings = {"state_dtype": form, "offload": offload}
    if "refresh_at" in METHODS[name].recipe.settings:
        settings["refresh_at"] = "first"
    model, optimizer, found = prepared(name, settings, CASES["float32"])
    loss_of(model, CASES["float32"], 0).backward()
    optimizer.step()
    with_maps = ("factor", "map", "velocity", "basis", "values")
    kinds = {False: (), True: ("factor",), "maps": with_maps}[offload]
    real = {
        value.data_ptr(): value.nbytes
        for entries in optimizer.state.values()
        for key, value in entries.items()
        if key.partition("_")[2] in kinds and key.startswith(("left", "right"))
    }
    work, recipe = work_of(name), METHODS[name].recipe
    units = units_of(found.layers)
    planned = [state_bytes(unit, recipe, work, torch.float32).host for unit in units]
    stacked = sum(real.values())  # stacks hold a view for each layer, as the host does a copy
    assert sum(planned) == stacked
    # SINGD averages no factors, so there is nothing but its roots and their velocities to offload.
    has_factors = work.captured is None or work.captured.keeps_factors
    assert bool(stacked) == (offload == "maps" or (offload and has_factors))


@pytest.mark.parametrize("name", list(METHODS))
def test_the_state_is_named_tensor_by_tensor(name: str) -> None:
    work = work_of(name)
    model, optimizer, found = prepared(name, {}, CASES["transformer"])
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, CASES["transformer"], step).backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    captured = {
        f"{side}_{kind}"
        for side in ("left", "right")
        for kind in ("factor", "map", "velocity", "basis", "values")
    }
    for layer in found.layers:
        state = optimizer.state[parameters[layer.name]]
        tensors = {key: value.numel() for key, value in state.items() if isinstance(value, Tensor)}
        if any(layer.matrices.captured):
            tensors = {key: size for key, size in tensors.items() if key not in captured}
        assert tensors == work.keeps(layer.matrices, layer.settings), layer.name


def test_a_bound_holds_for_each_call_and_a_spec_for_one_layer() -> None:
    torch.manual_seed(0)
    layer, head = nn.Linear(12, 12), nn.Linear(12, 4)
    case = Case(lambda: nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), head), torch.randn(9, 12))
    model, recipe = case.build(), GoMuon.recipe
    uses = find_input_uses(model, case.x)
    settings = {**recipe.defaults, "rows": 5}
    specs = {"4.weight": LayerSpec(rows=3)}
    routes: Routes = {"4.weight": "matrix"}
    found = find_layers(model, recipe, settings, uses, specs=specs, routes=routes)
    assert [x.sampled_rows(1.0) for x in found.layers] == [2 * 5, 3]
    assert [x.sampled_rows(0.5) for x in found.layers] == [9, 3]
    optimizer = GoMuon(model, rows=5, specs=specs, routes=routes)
    model(case.x).square().sum().backward()
    statistics = optimizer._capture.groups[0].collect()
    for x, weight in zip(found.layers, (layer.weight, head.weight), strict=True):
        gradients = statistics[weight].gradients
        assert gradients is not None
        assert float(gradients.count) == x.sampled_rows(1.0)


def test_an_automatic_number_of_rows_is_the_captures() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))
    x = torch.randn(1000, 8)
    routes: Routes = {"2.weight": "matrix"}
    uses = find_input_uses(model, x)
    recipe = GoMuon.recipe
    settings = {**recipe.defaults, "rows": "auto"}
    found = find_layers(model, recipe, settings, uses, routes=routes)
    assert [layer.sampled_rows(1.0) for layer in found.layers] == [256, 300]  # 300 inputs as 2×150
    optimizer = GoMuon(model, routes=routes, rows="auto")
    model(x).square().sum().backward()
    statistics = optimizer._capture.groups[0].collect()
    for layer, module in zip(found.layers, (model[0], model[2]), strict=True):
        gradients = statistics[module.get_parameter("weight")].gradients
        assert gradients is not None
        assert float(gradients.count) == layer.sampled_rows(1.0)


def test_backward_without_capture_is_what_is_left_over() -> None:
    """The first test subtracts moments from a backward pass; this is that pass without any."""
    case = CASES["transformer"]
    model, _, found = prepared("GoMuon", {}, case)
    products, _ = counted(loss_of(model, case, 0).backward)
    plain, _ = counted(loss_of(_transformer(), case, 0).backward)
    moments = every_unit(units_of(found.layers), moment_work)
    assert products - plain == flops(moments) > 0


def test_queries_keys_and_values_are_one_unit_and_so_are_gate_and_up() -> None:
    *_, found = prepared("GoMuon", {}, CASES["transformer"])
    units = [[layer.name.split(".")[-2] for layer in u] for u in units_of(found.layers)]
    assert units == [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]
    *_, found = prepared("Muon", {}, CASES["transformer"])
    assert all(len(unit) == 1 for unit in units_of(found.layers))


def test_without_a_forward_pass_nothing_is_shared() -> None:
    recipe = GoMuon.recipe
    found = find_layers(transformer(), recipe, recipe.defaults)
    assert all(len(unit) == 1 for unit in units_of(found.layers))


def test_a_weight_no_forward_pass_reaches_has_no_moments() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.used(x))
            return out

    model, recipe = Idle(), GoMuon.recipe
    uses = find_input_uses(model, torch.randn(3, 4))
    found = find_layers(model, recipe, recipe.defaults, uses)
    moments = {x.name: moment_work([x], 2.0) for x in found.layers}
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
    _, optimizer, found = prepared("KFAC", {}, CASES["mlp"])
    assert [(r.name, r.treatment) for r in found.table] == [
        (r.name, r.treatment) for r in optimizer.routing_table()
    ]
    assert sum(part.elements for layer in found.layers for part in layer.tensors) == sum(
        r.parameter.numel() for r in found.table.treated("matrix")
    )
