"""What every method promises, whatever its formula: one table of methods, one list of promises."""

import copy
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import gomuon
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.methods.references.data import ROWS, layer, learn, rows
from tests.methods.table import (
    COMMON,
    EVERY_METHOD,
    EVERY_RECIPE,
    assert_equal,
    make,
    saved,
    values,
    wrong_values,
)
from tests.models import language_loss, mlp, tokens, train, transformer


def test_all_methods_of_the_package_are_public() -> None:
    inside = {name for name, method in METHODS.items() if method.__module__.startswith("gomuon.")}
    assert inside <= set(gomuon.__all__)
    assert all(getattr(gomuon, name) is METHODS[name] for name in inside)
    assert all(name == method.__name__ for name, method in METHODS.items())


@EVERY_RECIPE
def test_lowers_the_loss_by_its_matrices_alone(method: str, settings: dict[str, Any]) -> None:
    model = transformer(layers=1)
    optimizer = make(method, model, **settings, adamw={"lr": 0.0})
    others = {row.name for row in optimizer.routing_table().treated("adamw")}
    before = values(model)
    losses = [train(model, optimizer, range(1))[0] for _ in range(30)]
    assert losses[-1] < losses[0]
    moved = {name for name, p in values(model).items() if not torch.equal(p, before[name])}
    assert moved == before.keys() - others


class OddShapes(nn.Module):
    """Sides that no vector unit divides, single rows and columns, and a convolution in groups."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 6, 3, groups=2)
        sizes = (54, 7, 13, 7, 1, 5, 1, 5, 3)  # 7 × 54, 13 × 7, 7 × 13, 1 × 7, 5 × 1, 1 × 5, …
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(sizes))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        for linear in self.layers:
            x = torch.tanh(linear(x))
        return x


def train_odd(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> None:
    if not isinstance(model, OddShapes):
        train(model, optimizer, steps)
        return
    for step in steps:
        x = torch.randn(9, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(model.conv.weight.dtype)).square().mean().backward()
        optimizer.step()


@EVERY_RECIPE
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.slow),
    ],
)
def test_resumes_bit_for_bit_after_every_step(
    method: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Saved after every step of one clock cycle; state is loaded in the layout it is kept in."""

    def new(seed: int) -> tuple[nn.Module, MatrixOptimizer]:
        attends = method == "MuonQK"
        model = transformer(seed, dtype, layers=1) if attends else OddShapes(seed, dtype)
        return model, make(method, model, **settings)

    model, optimizer = new(0)
    files = []
    for step in range(6):
        train_odd(model, optimizer, range(step, step + 1))
        files.append(saved((model.state_dict(), optimizer.state_dict())))
    train_odd(model, optimizer, range(6, 12))
    for step, (weights, state) in enumerate(files, 1):
        resumed, fresh = new(9)
        resumed.load_state_dict(weights)
        fresh.load_state_dict(state)
        train_odd(resumed, fresh, range(step, 12))
        assert_equal(model, resumed)


@EVERY_RECIPE
def test_a_checkpoint_of_another_size_is_refused(method: str, settings: dict[str, Any]) -> None:
    if method == "MuonQK":
        pytest.skip("a lone layer has no queries and keys")
    optimizers = []
    for m, n in ((4, 6), (5, 7)):
        module = layer(m, n)
        optimizers.append(make(method, module, **settings))
        for step in range(2):
            learn(optimizers[-1], module, rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m))
    with pytest.raises(ValueError, match="shape"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())


@EVERY_RECIPE
def test_a_copy_trains_on_alike(method: str, settings: dict[str, Any]) -> None:
    model = transformer(layers=1, dtype=torch.float32)
    optimizer = make(method, model, **settings)
    train(model, optimizer, range(6))
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(6, 12))
    train(twin, other, range(6, 12))
    assert_equal(model, twin)


@EVERY_RECIPE
def test_a_closure_is_the_same_training(method: str, settings: dict[str, Any]) -> None:
    model, twin = (transformer(layers=1, dtype=torch.float32) for _ in range(2))
    optimizer, other = make(method, model, **settings), make(method, twin, **settings)
    losses = train(model, optimizer, range(6))
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            other.zero_grad()
            loss = language_loss(twin, step)
            loss.backward()
            return loss

        assert other.step(closure).item() == losses[step]
    assert_equal(model, twin)


@EVERY_RECIPE
def test_a_scheduler_sets_the_rate_of_every_step(method: str, settings: dict[str, Any]) -> None:
    """Half the rate for three updates, then none at all, decay included."""
    model, twin = (transformer(layers=1, dtype=torch.float32) for _ in range(2))
    optimizer = make(method, model, **settings)
    scheduler = schedules.LambdaLR(optimizer, lambda step: 0.5 if step < 3 else 0.0)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    after = values(model)
    train(model, optimizer, range(3, 6))
    for name, p in values(model).items():
        assert torch.equal(p, after[name]), name

    half = make(method, twin, **settings)
    for group in half.param_groups:
        group["lr"] /= 2
    train(twin, half, range(3))
    assert_equal(model, twin)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: schedules.LinearLR(o, 0.1, 1.0, 3),
    lambda o: schedules.ConstantLR(o, 0.5, 3),
    lambda o: schedules.StepLR(o, 2),
    lambda o: schedules.MultiStepLR(o, [2, 4]),
    lambda o: schedules.ExponentialLR(o, 0.9),
    lambda o: schedules.CosineAnnealingLR(o, 6),
    lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedules.PolynomialLR(o, 10),
    lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9),
    lambda o: schedules.OneCycleLR(o, [0.08, 0.003], total_steps=8, cycle_momentum=False),
    lambda o: schedules.CyclicLR(o, [0.008, 0.0003], [0.08, 0.003], 2, cycle_momentum=False),
    lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_keep_the_groups_in_ratio(
    make: Callable[[torch.optim.Optimizer], Any],
) -> None:
    model = transformer(layers=1)
    optimizer = gomuon.Muon(model, lr=0.08, adamw={"lr": 0.003})
    scheduler = make(optimizer)
    rates = set()
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
        matrix, other = (group["lr"] for group in optimizer.param_groups)
        assert other == pytest.approx(matrix * 0.003 / 0.08)
        rates.add(matrix)
    assert len(rates) > 1


Loss = Callable[[nn.Module, int, slice], Tensor]


def regression(model: nn.Module, step: int, part: slice) -> Tensor:
    """Sixteen examples."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    return F.mse_loss(model(x[part]), y[part])


def language(model: nn.Module, step: int, part: slice) -> Tensor:
    """Sixteen windows."""
    window = tokens(step, batch=16)[part]
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def train_in_parts(
    model: nn.Module, optimizer: MatrixOptimizer, loss: Loss, parts: list[slice]
) -> None:
    for step in range(8):
        optimizer.zero_grad()
        for part in parts:
            (loss(model, step, part) / len(parts)).backward()
        optimizer.step()


@EVERY_RECIPE
def test_micro_batches_are_their_union(method: str, settings: dict[str, Any]) -> None:
    """On square layers, whose factors are regular: in a null space SOAP's basis is arbitrary."""

    def trained(parts: list[slice]) -> nn.Module:
        attends = method == "MuonQK"
        model = transformer(layers=1) if attends else mlp(6, 6, 6, 6, 3)
        optimizer = make(method, model, **settings, lr=1e-3)
        train_in_parts(model, optimizer, language if attends else regression, parts)
        return model

    whole, parts = values(trained([slice(16)])), values(trained([slice(8), slice(8, 16)]))
    for name, p in whole.items():
        error = float((parts[name] - p).norm() / p.norm())
        assert error < 1e-9, f"{name}: {error:.1e}"


@EVERY_RECIPE
@pytest.mark.parametrize("given", ["statistics", "gradients", "parameters"])
def test_zero_gradients_only_decay(method: str, settings: dict[str, Any], given: str) -> None:
    """With statistics of zeros, with none, or without a model; and training goes on after it."""
    if given == "parameters" and METHODS[method].recipe.model_use.needs_model:
        pytest.skip("it refuses bare parameters")
    decay = 0.0 if "geometry_decay" in settings else 0.1  # there it depends on the maps
    if "weight_decay" in METHODS[method].recipe.settings:
        settings = {**settings, "weight_decay": decay}
    else:
        decay = 0.0
    known = {**METHODS[method].recipe.defaults, **settings}
    decay = 1.0 if known.get("constrained") else decay
    model = transformer(layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers nothing was captured of
        bare = given == "parameters"
        optimizer = METHODS[method](model.named_parameters() if bare else model, **settings)
        matrices = {row.name for row in optimizer.routing_table().treated("matrix")}
        before = values(model)
        for step in range(5):
            optimizer.zero_grad()
            if given == "statistics":
                language_loss(model, step).mul(0).backward()
            else:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    steps = 5 - METHODS[method].recipe.observes_first
    for name, value in values(model).items():
        kept = (1 - lr * decay) ** steps if name in matrices else 1.0
        torch.testing.assert_close(value, kept * before[name], rtol=1e-12, atol=0, msg=name)
    train(model, optimizer, range(5))
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in values(model).items())


@EVERY_RECIPE
def test_missing_gradients_leave_a_parameter_alone(method: str, settings: dict[str, Any]) -> None:
    model = transformer(layers=1)
    optimizer = make(method, model, **settings)
    optimizer.step()
    assert not optimizer.state, "no gradient anywhere"
    assert all(group["step"] == 0 for group in optimizer.param_groups)
    frozen = model.get_parameter("trunk.blocks.0.mlp.up.weight")
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    train(model, optimizer, range(5))
    assert torch.equal(frozen, before)
    assert not optimizer.state.get(frozen)
    frozen.requires_grad_(True)
    train(model, optimizer, range(5, 10))
    assert not torch.equal(frozen, before)
    assert all(p.isfinite().all() for p in model.parameters())


@EVERY_METHOD
def test_bad_values_are_named(method: str) -> None:
    """Every setting has a kind, and every kind refuses something."""
    wrong = [
        (name, value)
        for table in (wrong_values(method), COMMON)
        for name, values in table.items()
        for value in values
    ]
    accepted = [(name, value) for name, value in wrong if not is_refused(method, name, value)]
    assert not accepted


def is_refused(method: str, name: str, value: Any) -> bool:
    """Whether a ValueError says so; it must name the keyword and the value."""
    try:
        make(method, transformer(layers=1), **{name: value})
    except ValueError as error:
        return bool(re.search(rf"\b{name}\b", str(error))) and repr(value) in str(error)
    return False


@EVERY_METHOD
def test_an_unknown_keyword_is_refused(method: str) -> None:
    with pytest.raises(TypeError, match="no_such_thing"):
        make(method, transformer(layers=1), no_such_thing=1)


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight"])
def test_kfac_leaves_half_of_a_frozen_layer_alone(frozen: str) -> None:
    """Weight and bias are one matrix to K-FAC; freezing one must not freeze or move the other."""
    model = mlp(6, 6, 6, 3)
    optimizer = make("KFAC", model)
    model.get_parameter(frozen).requires_grad_(False)
    before = values(model)
    for step in range(4):
        optimizer.zero_grad()
        regression(model, step, slice(16)).backward()
        optimizer.step()
    still = {name for name, value in values(model).items() if torch.equal(value, before[name])}
    assert still == {frozen}
