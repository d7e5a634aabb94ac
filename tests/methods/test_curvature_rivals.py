"""The rivals with curvature follow, on fixed random data, plain loops written from their formulas.

Official sources are named in the recipes' origins. Settings that make ours and theirs equal are the
defaults, except where a docstring says so.
"""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import gomuon
from gomuon.functional.polar_factor import polar
from gomuon.methods.qsd import ball_minimiser
from gomuon.parameters.side_forms import form_of
from tests.methods import references
from tests.methods.references.cut_sides import CutSide
from tests.methods.references.data import ROWS, SHAPES, layer, learn, relative_error, rows
from tests.methods.test_recipes import PRECISIONS, Case, assert_follows, follow

# The first Gram of a wide or tall gradient is singular, and its basis not unique: square matrices,
# and sides that go without.
ROTATING = [
    (Case("SOAPMuon"), "square"),
    (Case("SOAPMuon", {"refresh_every": 3, "betas": (0.9, 0.99), "eps": 1e-3}), "square"),
    (Case("SOAPMuon", {"square_root": True, "refresh_every": 2, "weight_decay": 0.1}), "square"),
    (Case("KLShampoo"), "square"),
    (Case("KLShampoo", {"lr": 0.02, "refresh_every": 3, "clamp": None}), "square"),
    (Case("KLShampoo", {"lr": 0.02, "refresh_every": 2, "nesterov": True, "eps": 0.1}), "square"),
    (Case("KLShampoo", {"lr": 0.02, "first_values": 2.0, "factor_decay": 0.5}), "square"),
    (Case("KLSOAP", {"lr": 0.01}), "square"),
    (Case("KLSOAP", {"lr": 0.01, "refresh_every": 3, "betas": (0.8, 0.9)}), "square"),
    *(
        (Case(method, {"lr": 0.01, "refresh_every": 3, "max_side": 4}), shape)
        for shape in SHAPES
        for method in ("SOAPMuon", "KLShampoo", "KLSOAP")
    ),
]
CAPTURED = [
    Case("QSD"),
    Case("QSD", {"scale": 100.0, "steps": 5, "refresh_every": 3, "input_decay": 0.9}),
    Case("QSD", {"scale": 10.0, "steps": 1, "nesterov": False, "weight_decay": 0.1}),
    Case("QSD", {"scale": 0.0}),
    Case("SINGD", {"lr": 1e-2}),
    Case("SINGD", {"lr": 1e-2, "refresh_every": 1, "root_rate": 0.05, "damping": 0.1}),
    Case("SINGD", {"lr": 1e-2, "refresh_every": 3, "like_kfac": True, "weight_decay": 0.1}),
    Case("SINGD", {"lr": 1e-2, "refresh_every": 2, "normalise": True, "root_rate": 0.3}),
]


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_with_captured_factors(
    case: Case, shape: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    assert_follows(case, SHAPES[shape], tolerance, dtype=dtype, steps=steps)


@pytest.mark.parametrize("form", [{"block_size": 2}, {"block_size": 3}, {"max_side": 1}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["SINGD", "QSD"])
def test_with_factors_in_blocks_and_with_diagonals(
    method: str, shape: str, form: dict[str, Any]
) -> None:
    settings = {**form, "long_sides": "diagonal"}
    (m, n), own = SHAPES[shape], {"lr": 1e-2, "refresh_every": 2}
    optimizer_case, module = Case(method, {**own, **settings}), layer(*SHAPES[shape])
    optimizer = optimizer_case.optimizer(module)
    reference = Case(method, own).reference(module.weight)
    reference.left, reference.right = (cut(d, form) for d in (m, n))
    for step in range(20):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        learn(optimizer, module, x, g)
        reference.step(g.T @ x, x, g)
        assert relative_error(module.weight, reference.W) < 1e-8, step


def cut(d: int, form: dict[str, Any]) -> CutSide:
    """How a side is cut: into the fewest equal pieces, if up to twice the fewest are equal."""
    if "max_side" in form:
        return CutSide(diagonal=d > 1)
    forms = form_of(d, form["block_size"])
    return CutSide((*[forms.size] * (forms.blocks - 1), forms.last))


@pytest.mark.parametrize("shape", SHAPES)
def test_singd_moves_weight_and_bias_as_one_matrix(shape: str) -> None:
    (m, n), case = SHAPES[shape], Case("SINGD", {"refresh_every": 2, "lr": 1e-2})
    module = layer(m, n, bias=True)
    optimizer = case.optimizer(module)
    reference = case.reference(torch.cat([module.weight, module.bias[:, None]], 1))
    for step in range(20):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        learn(optimizer, module, x, g)
        x = torch.cat([x, torch.ones(ROWS, 1).double()], 1)
        reference.step(g.T @ x, x, g)
    assert relative_error(module.weight, reference.W[:, :-1]) < 1e-8
    assert relative_error(module.bias, reference.W[:, -1]) < 1e-8


def test_singds_roots_find_the_inverse_of_a_constant_factor() -> None:
    """At its fixed point with `like_kfac`, KᵀAK + λKᵀK = I, so KKᵀ = (A + λI)⁻¹."""
    module, damping = layer(4, 6), 0.1
    optimizer = gomuon.SINGD(
        module, lr=0.0, like_kfac=True, root_rate=0.3, damping=damping, refresh_every=1
    )
    x, g = rows(0, ROWS, 6), rows(1, ROWS, 4)
    for _ in range(400):
        learn(optimizer, module, x, g, weight=1 / ROWS)
    state = optimizer.state[module.weight]
    for name, v in (("right_map", x), ("left_map", g)):
        K = state[name][0]
        inverse = torch.linalg.inv(v.T @ v / ROWS + damping * torch.eye(len(K)).double())
        assert relative_error(K @ K.T, inverse) < 1e-6


# ---- the ball of QSD -----------------------------------------------------------------------------


def model_value(M: Tensor, U: Tensor, B: Tensor, A: Tensor, c: float) -> Tensor:
    return (-M * U).sum((-2, -1)) + c / 2 * (U * (B @ U @ A)).sum((-2, -1))


@pytest.mark.parametrize("curvature", [0.0, 0.01, 1.0])
def test_frank_wolfe_falls_to_the_minimum_in_the_ball(curvature: float) -> None:
    """The duality gap ⟨gradient, U − vertex⟩ bounds the distance to the minimum from above."""
    M = rows(0, 3, 4, 6)
    A, B = (v.mT @ v / 9 for v in (rows(1, 3, 9, 6), rows(2, 3, 9, 4)))
    values = []
    for steps in (1, 2, 4, 8, 200):
        U = ball_minimiser(M, B, A, curvature, steps=steps, polar_method="exact")
        assert float(torch.linalg.matrix_norm(U, 2).max()) < 1 + 1e-9
        values.append(model_value(M, U, B, A, curvature))
    for before, after in pairwise(values):
        assert bool((after <= before + 1e-9).all())
    gradient = -M + curvature * B @ U @ A
    gap = (gradient * (U - polar(-gradient, "exact"))).sum((-2, -1))
    assert bool((gap < 0.02 * values[-1].abs()).all())


@pytest.mark.parametrize("curvature", [1e-5, 1e-4, 1e-3])
def test_rounding_does_not_decide_whether_qsds_last_step_is_taken(curvature: float) -> None:
    """Steps grow shorter by a factor each; soon their gain is below its rounding error."""
    M = rows(0, 3, 4, 6)
    A, B = (v.mT @ v / 9 for v in (rows(1, 3, 9, 6), rows(2, 3, 9, 4)))
    nearly = M * (1 + 1e-15 * rows(3, 3, 4, 6))
    one, other = (ball_minimiser(X, B, A, curvature, steps=3) for X in (M, nearly))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_without_curvature_qsd_is_muon() -> None:
    models = [layer(4, 6), layer(4, 6)]
    shared: dict[str, Any] = {"lr": 0.02, "momentum": 0.8}
    ours = gomuon.QSD(models[0], scale=0.0, **shared), gomuon.Muon(models[1], **shared)
    for step in range(5):
        for module, optimizer in zip(models, ours, strict=True):
            learn(optimizer, module, rows(2 * step, ROWS, 6), rows(2 * step + 1, ROWS, 4))
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-12, atol=1e-12)


def test_with_much_curvature_qsd_is_shorter_than_its_ball() -> None:
    lengths = []
    for scale in (0.0, 1.0, 1e4):
        module = layer(4, 6)
        before = module.weight.detach().clone()
        optimizer = gomuon.QSD(module, lr=0.1, scale=scale, momentum=0.0, refresh_every=1)
        learn(optimizer, module, rows(0, ROWS, 6), rows(1, ROWS, 4), weight=1 / ROWS)
        lengths.append(float(torch.linalg.matrix_norm(module.weight.detach() - before, 2)))
    assert lengths[0] == pytest.approx(0.1)
    assert lengths[0] >= lengths[1] > lengths[2]


# ---- bases that rotate ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("case", "shape"), ROTATING, ids=str)
def test_in_rotating_bases(
    case: Case, shape: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    assert_follows(case, SHAPES[shape], tolerance, dtype=dtype, steps=steps)


@pytest.mark.parametrize("shape", ["wide", "tall", "row"])
@pytest.mark.parametrize("method", ["SOAPMuon", "KLShampoo", "KLSOAP"])
def test_from_any_first_basis(method: str, shape: str) -> None:
    """Of the null space of the first Gram any basis is good: the reference takes ours."""
    case = Case(method, {"refresh_every": 3, "lr": 0.01})
    for step, (module, optimizer, reference) in enumerate(follow(case, SHAPES[shape])):
        assert isinstance(reference, references.SOAP | references.KLShampoo | references.KLSOAP)
        if step == 0:
            state = optimizer.state[module.weight]
            reference.Q_L, reference.Q_R = state["left_basis"][0], state["right_basis"][0]
            for Q, S in ((reference.Q_L, reference.L), (reference.Q_R, reference.R)):
                torch.testing.assert_close(Q.T @ Q, torch.eye(len(Q)).double())
                diagonal = torch.diag(torch.linalg.eigvalsh(S).flip(0))
                torch.testing.assert_close(Q.T @ S @ Q, diagonal, rtol=0, atol=1e-12)
        else:
            assert relative_error(module.weight, reference.W) < 1e-8, step


@pytest.mark.parametrize("method", ["SOAPMuon", "KLShampoo", "KLSOAP", "QSD", "SINGD"])
def test_defaults_are_the_published_ones(method: str) -> None:
    """Of QSD, whose code is not public, those of Go-MUON."""
    ours = getattr(gomuon, method)
    shown = inspect.signature(ours).parameters
    theirs = inspect.signature(getattr(references, method)).parameters
    published = {name: p.default for name, p in theirs.items() if name != "W"}
    assert {name: ours.recipe.defaults[name] for name in published} == published
    assert {name: shown[name].default for name in published} == published
