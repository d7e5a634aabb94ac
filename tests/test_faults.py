"""Bad statistics, bad gradients, bad settings: named, counted, and nothing lost."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon import GeometryWarning, GoMuon, Muon, NonFiniteGradientError
from gomuon.optimizer import MatrixOptimizer
from tests.models import language_loss, mlp, train, transformer

NAME = "trunk.blocks.0.attention.o.weight"


def snapshot(model: nn.Module, optimizer: MatrixOptimizer) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])


def assert_unchanged(before: tuple[Any, Any], model: nn.Module, optimizer: MatrixOptimizer) -> None:
    weights, state = before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert state.keys() == optimizer.state_dict()["state"].keys()
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            old = state[index][key]
            assert torch.equal(value, old) if isinstance(value, Tensor) else value == old


def poison_statistics(optimizer: MatrixOptimizer, parameter: nn.Parameter) -> None:
    """NaN in one layer's captured moments, with every gradient finite."""
    statistics = optimizer._capture.groups[0].collect()[parameter]
    for moment in (statistics.inputs, statistics.gradients):
        assert moment is not None
        moment.total[0, 0] = torch.nan


def test_a_non_finite_factor_keeps_the_last_geometry() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(4))
    parameter = model.get_parameter(NAME)
    before = copy.deepcopy(optimizer.state[parameter])
    neighbour = model.get_parameter("trunk.blocks.0.mlp.down.weight")
    neighbour_map = optimizer.state[neighbour]["left_map"].clone()

    optimizer.zero_grad()
    language_loss(model, 4).backward()
    poison_statistics(optimizer, parameter)
    with pytest.warns(GeometryWarning, match=NAME) as caught:
        optimizer.step()
    assert len(caught) == 1
    state = optimizer.state[parameter]
    for key in ("left_map", "right_map", "left_factor"):
        assert torch.equal(state[key], before[key]), key
    assert state["failures"] == 2  # one for each side
    assert not torch.equal(optimizer.state[neighbour]["left_map"], neighbour_map)
    train(model, optimizer, range(5, 12))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_failure_is_reported_once() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=1)
    parameter = model.get_parameter(NAME)
    train(model, optimizer, range(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 4):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            poison_statistics(optimizer, parameter)
            optimizer.step()
    assert len([w for w in caught if issubclass(w.category, GeometryWarning)]) == 1
    assert optimizer.state[parameter]["failures"] == 6


def test_a_first_factor_that_fails_leaves_identity_maps() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    parameter = model.get_parameter(NAME)
    language_loss(model, 0).backward()
    poison_statistics(optimizer, parameter)
    with pytest.warns(GeometryWarning):
        optimizer.step()
    assert "left_map" not in optimizer.state[parameter]
    assert parameter.isfinite().all()


def test_a_failing_decomposition_costs_only_its_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(4))
    parameter = model.get_parameter("trunk.blocks.0.mlp.down.weight")
    others = {
        p: optimizer.state[p]["right_map"].clone() for p in optimizer.param_groups[0]["params"]
    }
    true_eigh = torch.linalg.eigh

    def fails_for_24(S: Tensor) -> Any:
        if S.shape[-1] == 24 and (S.ndim == 2 or len(S) == 1):
            raise torch.linalg.LinAlgError("did not converge")
        return true_eigh(S)

    monkeypatch.setattr(torch.linalg, "eigh", fails_for_24)
    with pytest.warns(GeometryWarning, match="or a decomposition failed"):
        train(model, optimizer, range(4, 5))
    assert torch.equal(optimizer.state[parameter]["right_map"], others[parameter])
    renewed = [
        p for p, old in others.items() if not torch.equal(optimizer.state[p]["right_map"], old)
    ]
    assert len(renewed) == len(others) - 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [NAME, "embedding.weight"])
def test_a_non_finite_gradient_raises_and_changes_nothing(bad: float, name: str) -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(4))
    optimizer.zero_grad()
    language_loss(model, 4).backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    gradient[0, 0] = bad
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteGradientError, match=name):
        optimizer.step()
    assert_unchanged(before, model, optimizer)


def test_a_skipped_step_never_happened() -> None:
    """With "skip", a poisoned batch leaves weights, momentum, B̄ and the clock as they were."""
    clean, other = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(clean), GoMuon(other, nonfinite="skip")
    train(clean, first, range(9))
    train(other, second, range(4))
    second.zero_grad()
    (language_loss(other, 77) * torch.nan).backward()
    with pytest.warns(GeometryWarning, match="the step was skipped"):
        second.step()
    assert second.param_groups[0]["skipped"] == 1
    train(other, second, range(4, 9))
    for p, q in zip(clean.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_whose_squares_do_not_overflow_are_fine(dtype: torch.dtype) -> None:
    """A norm beyond float16 is no overflow: the step computes in float32."""
    model = mlp(30, 40, 2, dtype=dtype)
    optimizer = Muon(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3e4 if dtype == torch.float16 else 1e15)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)


@pytest.mark.parametrize("large", [1e20, 1e38])
def test_a_finite_gradient_whose_squares_overflow_is_refused(large: float) -> None:
    model = mlp(3, 4, 2, dtype=torch.float32)
    for method in (Muon, gomuon.SOAP):
        optimizer = method(model)
        for p in model.parameters():
            p.grad = torch.full_like(p, large)
        before = snapshot(model, optimizer)
        with pytest.raises(NonFiniteGradientError, match=r"'0.weight' is so large \(1e\+"):
            optimizer.step()
        assert_unchanged(before, model, optimizer)


class Unused(nn.Module):
    """`bypassed` is used by its weight alone, in no matrix product, so nothing sees its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.bypassed, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.seen(x)).unsqueeze(-2)
        return self.head((hidden * self.bypassed.weight).sum(-1))


def test_a_layer_never_captured_runs_as_muon_with_one_warning() -> None:
    torch.manual_seed(0)
    model, twin = Unused(), Unused()
    twin.load_state_dict(model.state_dict())
    optimizer = GoMuon(model, lr=0.02, polar="exact")
    muon = Muon(twin, lr=0.02, polar="exact")
    x = torch.randn(8, 4)
    with pytest.warns(GeometryWarning, match=r"captured for 'bypassed.weight'") as caught:
        for step in range(9):
            for m, o in ((model, optimizer), (twin, muon)):
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
            if step == 0:
                torch.testing.assert_close(model.bypassed.weight, twin.bypassed.weight)
                assert not torch.allclose(model.seen.weight, twin.seen.weight)
    assert len(caught) == 1


def test_bare_parameters_warn_once_and_run_as_muon() -> None:
    model, twin = mlp(3, 4, 2), mlp(3, 4, 2)
    x = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.warns(GeometryWarning, match="pass the model itself") as caught:
        optimizer = GoMuon(model.parameters(), lr=0.02)
        muon = Muon(twin.parameters(), lr=0.02)
        for m, o in ((model, optimizer), (twin, muon)):
            for _ in range(5):
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
    assert len(caught) == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, r"lr must be .* got -0.1"),
    ({"lr": float("nan")}, "lr must be"),
    ({"lr": float("inf")}, "lr must be"),
    ({"lr": "fast"}, "lr must be"),
    ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
    ({"momentum": -0.1}, "momentum must be"),
    ({"alpha": 0.6}, r"alpha must be .* got 0.6"),
    ({"alpha": -0.1}, "alpha must be"),
    ({"alpha": (0.25,)}, "alpha must be"),
    ({"alpha": (0.25, 0.75)}, "alpha must be"),
    ({"refresh_every": 0}, "refresh_every must be a whole number >= 1, got 0"),
    ({"refresh_every": 2.5}, "refresh_every must be"),
    ({"refresh_every": True}, "refresh_every must be"),
    ({"factor_decay": 1.0}, "factor_decay must be"),
    ({"factor_decay": -0.5}, "factor_decay must be"),
    ({"shrinkage": "ledoit"}, "shrinkage must be"),
    ({"shrinkage": 1.5}, "shrinkage must be"),
    ({"polar": "newton"}, "polar must be one of"),
    ({"graft": "adam"}, "graft must be"),
    ({"nesterov": 1}, "nesterov must be"),
    ({"weight_decay": -1e-2}, "weight_decay must be"),
    ({"loss_reduction": "none"}, "loss_reduction must be"),
    ({"nonfinite": "ignore"}, "nonfinite must be"),
    ({"adamw": {"lr": -1.0}}, "adamw's lr must be"),
    ({"adamw": {"betas": (0.9, 1.0)}}, "adamw's betas must be"),
    ({"adamw": {"eps": -1.0}}, "adamw's eps must be"),
    ({"adamw": {"learning_rate": 1.0}}, "but no 'learning_rate'"),
    ({"adamw": 3e-3}, "adamw must be a dict"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoMuon(mlp(3, 4, 2), **settings)


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS[:5] + BAD_SETTINGS[6:20])
def test_wrong_group_keys_are_named(settings: dict[str, Any], message: str) -> None:
    model = mlp(3, 4, 4, 2)
    parameters = list(model.parameters())
    optimizer = GoMuon(parameters[:2])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters[2:], **settings})
    assert len(optimizer.param_groups) == 1


def complex_layer() -> nn.Module:
    model = mlp(3, 4, 2)
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return model


def integer_parameter() -> nn.Module:
    model = mlp(3, 4, 2)
    table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    model.register_parameter("table", table)
    return model


def sparse_parameter() -> nn.Module:
    model = mlp(3, 4, 2)
    model.register_parameter("mask", nn.Parameter(torch.eye(3).to_sparse()))
    return model


BAD_MODELS = [
    (lambda: nn.Sequential(), "has no parameters"),
    (lambda: nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3)), "no linear layer or convolution"),
    (lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)), "sparse=False"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), "not initialised"),
    (complex_layer, "'phase' is torch.complex64"),
    (integer_parameter, "'table' is torch.int64"),
    (sparse_parameter, "'mask' has layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("make", "message"), BAD_MODELS)
@pytest.mark.parametrize("method", [GoMuon, Muon])
def test_models_that_cannot_be_optimized_are_refused(method: Any, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(make())


def test_bare_parameters_of_the_wrong_kind_are_refused_whole() -> None:
    good = nn.Parameter(torch.randn(3, 3))
    optimizer = Muon([good])
    with pytest.raises(ValueError, match="complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    good.grad = torch.ones_like(good)
    optimizer.step()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Parameter(torch.randn(5, 3))
    optimizer = Muon([table])
    table.grad = torch.eye(5, 3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


def test_errors_are_importable_from_the_top() -> None:
    assert issubclass(gomuon.DecompositionError, RuntimeError)


# ---- what overflows although every gradient is fine ----------------------------------------------


def test_a_direction_that_is_not_finite_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs its own layer one move, and no other layer anything."""
    model = mlp(4, 4, 4, 4, bias=False)
    optimizer = Muon(model, routes={"*": "matrix"})
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.eye(4, dtype=p.dtype)
    true_polar = gomuon.functional.polar

    def overflowing(X: Tensor, method: Any) -> Tensor:
        D = true_polar(X, method)
        D[1] = torch.inf
        return D

    with monkeypatch.context() as patched:
        patched.setattr("gomuon.recipes.stations.polar", overflowing)
        optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, True]
    with pytest.warns(GeometryWarning, match="was not finite"):
        state = optimizer.state_dict()["state"]
    assert [entries.get("failures", 0) for entries in state.values()] == [0, 1, 0]
    optimizer.step()  # the clean one moves it
    assert not torch.equal(list(model.parameters())[1], before[1])


@pytest.mark.parametrize("method", ["Shampoo", "Mousse", "SOAP", "MALT", "MuonSquared", "FISMO"])
def test_no_memory_keeps_an_overflow(method: str) -> None:
    """Even where nobody looks at the gradients: their squares are not written."""
    model = mlp(4, 5, 3, dtype=torch.float32)
    optimizer = getattr(gomuon, method)(model, nonfinite="allow")
    for large in (1.0, 1e30, 1.0):
        for p in model.parameters():
            generator = torch.Generator().manual_seed(p.numel())
            p.grad = large * torch.randn(p.shape, generator=generator)
        optimizer.step()
    matrices = optimizer.param_groups[0]["params"]
    kept = [
        (key, value)
        for p in matrices
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor) and key != "momentum"
    ]
    assert kept
    for key, value in kept:
        assert value.isfinite().all(), key
