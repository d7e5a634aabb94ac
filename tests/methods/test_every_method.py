"""What every method promises, whatever its formula: one table of methods, one list of promises."""

import copy
import inspect
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import gomuon
from gomuon.optimizer import MatrixOptimizer
from tests.methods.references.data import ROWS, layer, learn, rows
from tests.models import language_loss, mlp, tokens, train, transformer

# (method, settings): clocks short enough to turn over, options that carry state of their own.
RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {}),
    ("GoMuon", {"input_decay": 0.9, "shrinkage": {"damping": 0.1}}),
    ("GoMuon", {"alpha": (0.0, 0.25), "geometry_decay": True, "weight_decay": 0.1}),
    ("Muon", {}),
    ("MuonQK", {}),
    ("Halfspace", {"refresh_every": 4}),
    ("KFAC", {"statistics_every": 3, "refresh_every": 4}),
    ("Shampoo", {"statistics_every": 3, "refresh_every": 4, "block_size": 10}),
    ("Shampoo", {"refresh_every": 4, "graft": "adagrad", "factor_decay": 1.0}),
    ("SOAP", {"refresh_every": 4}),
    ("Mousse", {"refresh_every": 4}),
    ("FISMO", {}),
    ("NewtonMuon", {"refresh_every": 4}),
    ("MuonSquared", {}),
    ("MALT", {}),
    ("MuonPlus", {}),
    ("MuonEq", {"equilibrate": "row_col"}),
    ("Scion", {}),
    ("Scion", {"constrained": True}),
    ("KFACMuon", {"refresh_every": 4}),
]
EVERY_RECIPE = pytest.mark.parametrize(
    ("method", "settings"), RECIPES, ids=["-".join((name, *keys)) for name, keys in RECIPES]
)
EVERY_METHOD = pytest.mark.parametrize("method", list(dict.fromkeys(name for name, _ in RECIPES)))


def make(method: str, model: nn.Module, **settings: Any) -> MatrixOptimizer:
    made = getattr(gomuon, method)(model, **settings)
    assert isinstance(made, MatrixOptimizer)
    return made


def biased_transformer(seed: int, dtype: torch.dtype) -> nn.Module:
    """One layer has a bias, which K-FAC joins to its weight."""
    model = transformer(seed, dtype, layers=1)
    up = model.trunk.blocks[0].get_submodule("mlp.up")
    up.register_parameter(
        "bias", nn.Parameter(torch.zeros(up.get_parameter("weight").shape[0]).to(dtype))
    )
    return model


def saved(thing: Any) -> Any:
    """Through a file that may hold tensors and numbers only."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def keywords(method: str) -> list[str]:
    """A method's own, besides those all have."""
    shown = inspect.signature(getattr(gomuon, method)).parameters.values()
    every = [p.name for p in shown if p.kind != p.VAR_KEYWORD]
    return [
        name
        for name in every
        if name not in ("params", "routes", "specs", "process_group", *COMMON)
    ]


def test_the_table_is_complete() -> None:
    public = {name: getattr(gomuon, name) for name in gomuon.__all__}
    methods = {
        name
        for name, thing in public.items()
        if isinstance(thing, type) and issubclass(thing, MatrixOptimizer)
    }
    assert methods - {"MatrixOptimizer"} == {name for name, _ in RECIPES}


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


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit_in_mid_cycle(
    method: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = biased_transformer(0, dtype)
    optimizer = make(method, model, **settings)
    train(model, optimizer, range(6))
    weights, state = saved(model.state_dict()), saved(optimizer.state_dict())
    train(model, optimizer, range(6, 14))

    resumed = biased_transformer(9, dtype)
    resumed.load_state_dict(weights)
    other = make(method, resumed, **settings)
    other.load_state_dict(state)
    train(resumed, other, range(6, 14))
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
    scheduler = LambdaLR(optimizer, lambda step: 0.5 if step < 3 else 0.0)
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
@pytest.mark.parametrize("captured", [True, False])
def test_zero_gradients_only_decay(method: str, settings: dict[str, Any], captured: bool) -> None:
    """With statistics of zeros, or none at all; and nothing is spoilt for what comes after."""
    decay = 0.0 if "geometry_decay" in settings else 0.1  # there it depends on the maps
    settings = {**settings, "weight_decay": decay}
    decay = 1.0 if settings.get("constrained") else decay
    model = transformer(layers=1)
    optimizer = make(method, model, **settings)
    matrices = {row.name for row in optimizer.routing_table().treated("matrix")}
    before = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers nothing was captured of
        for step in range(5):
            optimizer.zero_grad()
            if captured:
                language_loss(model, step).mul(0).backward()
            else:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    steps = 4 if method == "SOAP" else 5  # its first only makes the bases
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


COMMON: dict[str, list[Any]] = {
    "loss_reduction": ["none"],
    "nonfinite": ["ignore"],
    "work": ["divided"],
    "process_group": ["world"],
    "adamw": [3e-3],
}
BAD: dict[str, list[Any]] = {
    "lr": [-0.1, float("nan"), "fast"],
    "momentum": [1.0, -0.1],
    "nesterov": ["yes"],
    "weight_decay": [-0.01],
    "alpha": [0.6, -0.1],
    "refresh_every": [0, 2.5],
    "statistics_every": [0, 2.5],
    "factor_decay": [1.5, -0.5],
    "input_decay": [1.0, -0.5],
    "square_decay": [1.0, -0.5],
    "geometry_decay": ["yes"],
    "shrinkage": ["ledoit", 1.5, {"damping": -1.0}, {"ridge": 1.0}],
    "damping": [-1.0],
    "kl_clip": [-1.0],
    "ridge": [-1e-6],
    "power": [-0.25],
    "graft": ["adam"],
    "block_size": [0, 2.5],
    "max_side": [-1, 2.5],
    "betas": [(0.9, 1.0), 0.9],
    "eps": [-1.0],
    "epsilon": [-1.0],
    "aspect": ["min"],
    "mu": [-1.0],
    "normalise": ["both"],
    "equilibrate": ["col"],
    "constrained": ["yes"],
    "radius": [-1.0],
    "head_radius": [-1.0],
    "scale": [-1.0],
    "tau": [1.0],
    "heads": [3],
    "partner_damping": [0.0],
    "polar": ["newton"],
    "norm": ["l1"],
    "token_stride": [0, 1.5],
    "token_skip": [-1, 1.5],
    "stagger": [1, None],
    "reduce": ["yes"],
}
# What one method means by a word, another does not know.
OWN_BAD: dict[str, dict[str, list[Any]]] = {
    "GoMuon": {"graft": ["sgd"], "factor_decay": [1.0]},
    "MALT": {"graft": ["sgd"], "alpha": [(0.1, 0.2)]},
    "Mousse": {"alpha": [(0.1, 0.2)], "factor_decay": [1.0]},
    "Shampoo": {"graft": ["frobenius"]},
}


@EVERY_METHOD
def test_bad_values_are_named(method: str) -> None:
    unknown = set(keywords(method)) - BAD.keys()
    assert not unknown, "keywords no bad value is listed for"
    known = {name: BAD[name] for name in keywords(method)}
    wrong = [
        (name, value)
        for table in (known, COMMON, OWN_BAD.get(method, {}))
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
