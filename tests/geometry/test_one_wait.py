"""The refresh that accelerators take, run on the CPU: one wait, and the same result."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gomuon import Adaptive, GeometryWarning, GoMuon
from gomuon.functional import factors, linalg
from gomuon.functional.factors import RootBatch, RootMethod
from gomuon.functional.polar_factor import PolarMethod
from gomuon.geometry import captured
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.telemetry import root_fallbacks
from tests.models import language_loss, train, transformer

NAME = "trunk.blocks.0.attention.v.weight"
WITH_ROOTS = [name for name, kind in METHODS.items() if "roots" in kind.recipe.settings]
# Gram–Schmidt always succeeds, so these have nothing to read and nothing to fall back to.
UNREAD = {"SOAP", "SOAPMuon", "KLShampoo", "KLSOAP"}
CAPTURED = [name for name in METHODS if METHODS[name].recipe.geometry.captured_sides(
    METHODS[name].recipe.defaults)[1]]  # fmt: skip


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch that devices with slow decompositions take."""
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)


WAITING = {
    *(getattr(Tensor, name) for name in ("tolist", "item", "__bool__", "__float__", "__int__",
                                         "__index__", "cpu", "numpy", "nonzero", "equal")),
    torch.equal,
    torch.nonzero,
}  # fmt: skip


class ReadBacks(TorchFunctionMode):
    """Counts the calls that would wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Numbers of rows, in float64, are on the host.
        known = isinstance(args[0], Tensor) and args[0].dtype == torch.float64 if args else False
        self.count += func in WAITING and not known
        return func(*args, **(kwargs or {}))


def made(name: str, model: nn.Module, **settings: Any) -> MatrixOptimizer:
    """An optimizer whose polar factor does not depend on the branch."""
    known = METHODS[name].recipe.settings
    chosen = {"refresh_every": 2, "refresh_at": "first", "polar": "fast", **settings}
    return METHODS[name](model, **{key: chosen[key] for key in chosen if key in known})


def test_the_methods_are_found() -> None:
    assert {"GoMuon", "Shampoo", "Mousse", "FISMO", "MuonQK", "NewtonMuon", "KFACMuon",
            "MatchedKFAC", "KFAC", "SOAP", "Halfspace"} <= set(WITH_ROOTS)  # fmt: skip
    captured = {"GoMuon", "KFAC", "KFACMuon", "MatchedKFAC", "NewtonMuon", "Halfspace"}
    assert captured <= set(CAPTURED)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", WITH_ROOTS)
def test_a_refresh_waits_once_and_decomposes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a decomposition")

    for routine in ("eigh", "eigvalsh", "svd", "qr", "inv", "solve", "solve_ex", "cholesky"):
        monkeypatch.setattr(torch.linalg, routine, refuse)
    model = transformer(layers=1, dtype=torch.float32)
    # K-FAC observes at every step by default, and an observation is read as well.
    optimizer = made(name, model, statistics_every=2)
    geometry = type(optimizer.recipe.geometry)
    counts = [0] * 4

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with ReadBacks() as seen:
                result = real(*args)
            counts[step] += seen.count
            return result

        return counted

    for part in ("refresh", "after"):
        monkeypatch.setattr(geometry, part, counting(getattr(geometry, part)))
    clock = optimizer.recipe.clock
    expected = []
    for step in range(4):
        group = {**optimizer.param_groups[0], "step": step}
        expected.append(int(clock.renews(group) and name not in UNREAD))
        train(model, optimizer, range(step, step + 1))
    assert counts == expected
    assert not root_fallbacks(optimizer)


@pytest.mark.parametrize("roots", ["products", "eigh"])
@pytest.mark.parametrize("polar", ["fast", "svd"])
def test_a_clock_that_adapts_decides_the_same(
    roots: RootMethod, polar: PolarMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the one wait there are roots which are not known to be good, not maps."""
    models = [transformer(layers=1) for _ in range(2)]
    every = Adaptive(0.97, least=1, most=8)
    optimizers = [GoMuon(x, refresh_every=every, roots=roots, polar=polar) for x in models]
    intervals = []
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(10))
        intervals.append([s["interval"] for s in optimizer.state.values() if "interval" in s])
        monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    assert intervals[0] == intervals[1]
    assert len(set(intervals[0])) > 1


@pytest.mark.usefixtures("accelerator")
def test_a_clock_that_adapts_waits_once_in_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(layers=1, dtype=torch.float32)
    optimizer = GoMuon(model, refresh_every=Adaptive(1e-9, least=1, most=4), polar="fast")
    real, counts = captured.CapturedMoments.refresh, []

    def counted(*args: Any) -> Any:
        with ReadBacks() as seen:
            result = real(*args)
        counts.append(seen.count)
        return result

    monkeypatch.setattr(captured.CapturedMoments, "refresh", counted)
    train(model, optimizer, range(9))
    assert counts == [1, 1, 1, 0, 1, 0, 0, 0, 1]


@pytest.mark.usefixtures("accelerator")
def test_a_factor_that_cannot_be_used_decides_nothing() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=Adaptive(1e-9, least=1, most=8), roots="products")
    train(model, optimizer, range(1))
    with pytest.warns(GeometryWarning, match=NAME):
        poisoned_step(model, optimizer, 1)
    down = model.get_parameter("trunk.blocks.0.mlp.down.weight")
    of_both = optimizer.state[model.get_parameter(NAME)], optimizer.state[down]
    assert [state["interval"] for state in of_both] == [2, 2]  # by q, k and o of its unit


@pytest.mark.parametrize("name", CAPTURED)
def test_the_result_is_that_of_the_refresh_that_waits_more_often(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same decompositions, to the last bit."""
    models = [transformer(layers=1) for _ in range(2)]
    optimizers = [made(name, model, roots="eigh") for model in models]
    train(models[0], optimizers[0], range(6))
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    train(models[1], optimizers[1], range(6))
    for (parameter, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), parameter
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert [entries.keys() for entries in states[0].values()] == [
        entries.keys() for entries in states[1].values()
    ]


# ---- factors that cannot be used -----------------------------------------------------------------


def poison(optimizer: MatrixOptimizer, parameter: nn.Parameter, value: float = torch.nan) -> None:
    statistics = optimizer._capture.groups[0].collect()[parameter]
    for moment in (statistics.inputs, statistics.gradients):
        assert moment is not None
        moment.total[0, 0] = value


def poisoned_step(model: nn.Module, optimizer: MatrixOptimizer, step: int) -> None:
    optimizer.zero_grad()
    language_loss(model, step).backward()
    poison(optimizer, model.get_parameter(NAME))
    optimizer.step()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("input_decay", [None, 0.9])
def test_an_unusable_factor_keeps_the_last_geometry(input_decay: float | None) -> None:
    model = transformer(layers=1)
    optimizer = made("GoMuon", model, input_decay=input_decay)
    train(model, optimizer, range(2))
    state = optimizer.state[model.get_parameter(NAME)]
    other = optimizer.state[model.get_parameter("trunk.blocks.0.mlp.down.weight")]
    before, others_map = copy.deepcopy(state), other["left_map"].clone()
    with pytest.warns(GeometryWarning, match=NAME):
        poisoned_step(model, optimizer, 2)
    assert state["failures"] == 2  # one for each side
    for key in before.keys() - {"momentum", "updates", "failures"}:
        same = torch.equal if isinstance(before[key], Tensor) else int.__eq__
        assert same(state[key], before[key]), key
    assert not torch.equal(other["left_map"], others_map)
    assert not root_fallbacks(optimizer)
    train(model, optimizer, range(3, 6))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt])
def test_an_interrupted_refresh_leaves_the_old_factors(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new ones may hold NaN: nothing has been read yet."""
    model = transformer(layers=1)
    optimizer = made("GoMuon", model)
    train(model, optimizer, range(2))
    states = [optimizer.state[row.parameter] for row in optimizer.routing_table().treated("matrix")]
    before = [dict(state) for state in states]

    def interrupted(*_: object) -> None:
        raise failure

    monkeypatch.setattr(captured, "start_roots", interrupted)
    with pytest.raises(failure):
        poisoned_step(model, optimizer, 2)
    for state, old in zip(states, before, strict=True):
        assert state.keys() == old.keys()
        for key in ("left_factor", "left_seen", "left_map", "right_map"):
            assert state[key] is old[key], key


@pytest.mark.usefixtures("accelerator")
def test_a_first_factor_that_fails_leaves_identity_maps() -> None:
    model = transformer(layers=1)
    optimizer = made("GoMuon", model)
    with pytest.warns(GeometryWarning):
        poisoned_step(model, optimizer, 0)
    state = optimizer.state[model.get_parameter(NAME)]
    assert not {"left_map", "right_map", "left_factor", "left_seen"} & state.keys()
    assert state["failures"] == 2


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_batch_without_rows_changes_no_map_and_is_no_failure(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    # By products, K-FAC's basis comes nearer to the eigenvectors of the same factor.
    settings = {"roots": "eigh"} if name == "KFAC" else {}
    optimizer = made(name, model, refresh_every=1, **settings)
    for rows in (5, 0):
        optimizer.zero_grad()
        model(torch.ones(rows, 3).double() + torch.arange(rows)[:, None]).square().sum().backward()
        kept = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("error", GeometryWarning)
            optimizer.step()
    assert any("right_map" in entries or "right_basis" in entries for entries in kept)
    for parameter, entries in zip(model.parameters(), kept, strict=True):
        state = optimizer.state[parameter]
        assert "failures" not in state
        for key in (key for key in entries if key.partition("_")[0] in ("left", "right")):
            same = torch.equal if isinstance(state[key], Tensor) else int.__eq__
            assert same(state[key], entries[key]), key


# ---- roots by products that cannot be trusted ----------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITH_ROOTS if name not in UNREAD])
def test_what_products_cannot_do_is_decomposed_and_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every root is refused, so that the run by products is that by decomposition."""
    real = RootBatch.multiply

    def refused(batch: RootBatch) -> None:
        real(batch)
        assert batch.products is not None
        roots, outcomes = batch.products
        assert bool((outcomes == factors._FINE).all())
        diverged = torch.full_like(outcomes, factors._DIVERGED)
        batch.products = torch.full_like(roots, torch.nan), diverged

    models = [transformer(layers=1) for _ in range(2)]
    plain = made(name, models[0], roots="eigh")
    train(models[0], plain, range(1))
    monkeypatch.setattr(RootBatch, "multiply", refused)
    optimizer = made(name, models[1], roots="products")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        train(models[1], optimizer, range(1))
    counts = root_fallbacks(optimizer)
    assert counts
    assert not root_fallbacks(plain)
    for row in optimizer.routing_table().treated("matrix"):
        state = optimizer.state[row.parameter]
        maps = [key for key in state if key.endswith(("_map", "_basis"))]
        assert counts.get(row.name, 0) >= len(maps)
        for key in maps:
            exact = plain.state[models[0].get_parameter(row.name)][key]
            assert torch.allclose(state[key], exact, rtol=1e-9, atol=1e-9), (row.name, key)
