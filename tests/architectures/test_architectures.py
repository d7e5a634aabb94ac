"""Every architecture is routed, captured, trained and resumed as its row of the table says."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GeometryWarning, GoMuon
from gomuon.parameters.routing import Route, RoutingTable
from tests.architectures.case import Case, Loss, label_of
from tests.architectures.reference import direct_sums, stacked
from tests.architectures.table import CASES

STEPS, SAVED = 10, 5
MIXTURES = ("Mixtral", "Qwen3-MoE")


def optimizers(case: Case, model: nn.Module, **settings: Any) -> dict[str, GoMuon]:
    """An optimizer for each part that has a loss of its own."""
    settings = {"lr": 0.01, "adamw": {"lr": 2e-3}, "refresh_every": 2, **case.settings, **settings}
    return {part: GoMuon(model.get_submodule(part), **settings) for part in case.losses()}


def full_name(part: str, name: str) -> str:
    return f"{part}.{name}" if part else name


def share_of_matrices(tables: list[RoutingTable]) -> float:
    """Of all trained weights that are not embeddings, vectors included, in per cent."""
    counted = [r for t in tables for r in t if r.kind != "embedding" and not r.is_frozen]
    matrices = sum(r.parameter.numel() for r in counted if r.treatment == "matrix")
    return 100 * matrices / sum(r.parameter.numel() for r in counted)


@contextmanager
def only_the_expected_warning(case: Case) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GeometryWarning)
        yield
    said = [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]
    unexpected = [text for text in said if case.says is None or not re.search(case.says, text)]
    assert not unexpected


@pytest.mark.parametrize("name", CASES)
def test_routing(name: str) -> None:
    case = CASES[name]
    with only_the_expected_warning(case):
        made = optimizers(case, case.build())
    tables = {part: optimizer.routing_table() for part, optimizer in made.items()}
    routes: dict[str, Route] = {full_name(part, r.name): r for part, t in tables.items() for r in t}
    found = {name: label_of(route) for name, route in routes.items()}
    expected = {name: case.expected(name) for name in routes}
    assert found == {n: "matrix" if one == "missed" else one for n, one in expected.items()}
    for pattern in case.patterns():
        assert any(fnmatchcase(name, pattern) for name in routes), pattern
    share = share_of_matrices(list(tables.values()))
    assert round(share) == case.share
    assert share >= 90 or name not in MIXTURES


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_has_the_factors_of_a_direct_computation(name: str) -> None:
    """A = Σxxᵀ/N, and B = N·Σδδᵀ because the loss is a mean."""
    case = CASES[name]
    model = case.build()
    made = optimizers(case, model, shrinkage=0.0, input_decay=0.5, refresh_every=1, rows=None,
                      block_size=4096)  # fmt: skip
    close = {"rtol": 1e-9, "atol": 1e-14} if case.dtype == torch.float64 else {"rtol": 2e-4}
    for part, loss in case.losses().items():
        copied = case.build()
        copied.load_state_dict(model.state_dict())
        sums = direct_sums(case, copied, seeded(loss, 0))
        with only_the_expected_warning(case):
            update(made[part], model, loss, 0)
        for route in made[part].routing_table().treated("matrix"):
            name = full_name(part, route.name)
            state = made[part].state[route.parameter]
            if case.expected(name) != "matrix":
                assert not {"left_factor", "right_factor"} & state.keys()
                continue
            own, A, B = sums[name], state["right_factor"], state["left_factor"]
            assert A.any() and B.any()
            rows = torch.tensor([own.rows.get(e, 1) for e in range(len(A))])[:, None, None]
            assert_close(A, stacked(own.A, A) / rows, **close)
            assert_close(B, stacked(own.B, B) * rows, **close)


@pytest.mark.parametrize("name", CASES)
def test_ten_updates_lower_the_loss_and_a_run_resumes_exactly(name: str) -> None:
    case = CASES[name]
    model = case.build()
    made = optimizers(case, model)
    saved: Any = None
    before: dict[str, list[float]] = {part: [] for part in made}
    with only_the_expected_warning(case):
        for step in range(STEPS):
            if step == SAVED:
                states = {part: one.state_dict() for part, one in made.items()}
                saved = copy.deepcopy((model.state_dict(), states))
            for part, loss in case.losses().items():
                before[part].append(update(made[part], model, loss, step))
    for part, losses in before.items():
        assert losses[-1] < losses[0] or case.parts, part

    again = case.build()
    again.load_state_dict(saved[0])
    resumed = optimizers(case, again)
    for part, one in resumed.items():
        one.load_state_dict(saved[1][part])
    with only_the_expected_warning(case):
        for step in range(SAVED, STEPS):
            for part, loss in case.losses().items():
                assert update(resumed[part], again, loss, step) == before[part][step]
    for (name, one), other in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(one, other), name


def seeded(loss: Loss, step: int) -> Loss:
    """The loss with the random numbers of a step, for dropout."""

    def compute(model: Any) -> Tensor:
        torch.manual_seed(step)
        return loss(model)

    return compute


def update(optimizer: GoMuon, model: nn.Module, loss: Loss, step: int) -> float:
    value = seeded(loss, step)(model)
    model.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


def assert_close(found: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> None:
    """Close in the norm of each matrix."""
    assert found.shape == expected.shape
    error = (found - expected).flatten(1).norm(dim=1)
    assert (error <= rtol * expected.flatten(1).norm(dim=1) + atol).all(), float(error.max())
