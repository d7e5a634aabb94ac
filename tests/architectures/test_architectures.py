"""Every architecture is routed, captured, trained and resumed as its row of the table says."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
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
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MIXTURES = ("Mixtral", "Qwen3-MoE")
# Factors that are only sums: not shrunk, not cut into blocks, of all rows, A kept as well.
AS_MEASURED = {"shrinkage": 0.0, "block_size": 4096, "rows": None, "input_decay": 0.5}


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
def no_warning_but(expected: str | None) -> Iterator[None]:
    """Warnings of the package are errors; but the expected one must be given."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GeometryWarning)
        yield
    said = [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]
    assert [bool(expected and re.search(expected, text)) for text in said] == [True] * len(said)
    assert said or expected is None


@pytest.mark.parametrize("architecture", CASES)
def test_routing(architecture: str) -> None:
    case = CASES[architecture]
    with no_warning_but(None):
        made = optimizers(case, case.build())
    tables = {part: optimizer.routing_table() for part, optimizer in made.items()}
    routes: dict[str, Route] = {full_name(part, r.name): r for part, t in tables.items() for r in t}
    expected = {name: case.expected(name) for name in routes}
    matrices = {"matrix", "missed"}
    assert {name: label_of(route) for name, route in routes.items()} == {
        name: "matrix" if label in matrices else label for name, label in expected.items()
    }
    for pattern in case.patterns():
        assert any(fnmatchcase(name, pattern) for name in routes), pattern
    share = share_of_matrices(list(tables.values()))
    assert round(share) == case.share
    assert share >= 90 or architecture not in MIXTURES


@pytest.mark.parametrize("architecture", CASES)
def test_every_matrix_has_the_factors_of_a_direct_computation(architecture: str) -> None:
    """A = Σxxᵀ/N, and B = N·Σδδᵀ because the loss is a mean."""
    case = CASES[architecture]
    model = case.build()
    made = optimizers(case, model, refresh_every=1, **AS_MEASURED)
    for part, loss in case.losses().items():
        copied = case.build()
        copied.load_state_dict(model.state_dict())
        sums = direct_sums(case, copied, seeded(loss, 0))
        with no_warning_but(case.says):
            update(made[part], model, loss, 0)
        for route in made[part].routing_table().treated("matrix"):
            name, state = full_name(part, route.name), made[part].state[route.parameter]
            if case.expected(name) != "matrix":
                assert not {"left_factor", "right_factor"} & state.keys()
                continue
            own, A, B = sums[name], state["right_factor"], state["left_factor"]
            rows = torch.tensor([own.rows.get(e, 1) for e in range(len(A))])[:, None, None]
            for found, sum_ in ((A, stacked(own.A, A) / rows), (B, stacked(own.B, B) * rows)):
                assert found.any()
                assert_close(found, sum_, 1e-9 if case.dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("architecture", CASES)
def test_ten_updates_lower_the_loss_and_a_run_resumes_exactly(architecture: str) -> None:
    case = CASES[architecture]
    model, parts = case.build(), case.losses()
    made = optimizers(case, model)
    first = copy.deepcopy(model.state_dict())
    with no_warning_but(case.says):
        train(model, made, parts, range(SAVED))
        states = {part: one.state_dict() for part, one in made.items()}
        saved = copy.deepcopy((model.state_dict(), states))
        losses = train(model, made, parts, range(SAVED, STEPS))

    again = case.build()
    again.load_state_dict(saved[0])
    resumed = optimizers(case, again)
    for part, one in resumed.items():
        one.load_state_dict(saved[1][part])
    with no_warning_but(case.says):
        assert train(again, resumed, parts, range(SAVED, STEPS)) == losses
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name

    for part, loss in parts.items():
        trained = seeded(loss, 0)(model).item()
        untrained = {k: first[k] if k.startswith(part) else v for k, v in saved_now(model).items()}
        again.load_state_dict(untrained)
        assert trained < seeded(loss, 0)(again).item(), part


def test_the_page_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) % \|", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [(name, str(case.share)) for name, case in CASES.items()]


def train(
    model: nn.Module, made: Mapping[str, GoMuon], parts: Mapping[str, Loss], steps: range
) -> list[float]:
    """Update every part in turn; returns the losses."""
    return [update(made[part], model, loss, s) for s in steps for part, loss in parts.items()]


def saved_now(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def seeded(loss: Loss, step: int) -> Loss:
    """The loss with the random numbers of a step, for dropout."""

    def compute(model: Any) -> Tensor:
        torch.manual_seed(step)
        return loss(model)

    return compute


def update(optimizer: GoMuon, model: nn.Module, loss: Loss, step: int) -> float:
    model.zero_grad()
    value = seeded(loss, step)(model)
    value.backward()
    optimizer.step()
    return value.item()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Close in the norm of each matrix."""
    assert found.shape == expected.shape
    error = (found - expected).flatten(1).norm(dim=1)
    scale = expected.flatten(1).norm(dim=1)
    assert (error <= tolerance * scale).all(), f"{float((error / scale).max()):.1e}"
