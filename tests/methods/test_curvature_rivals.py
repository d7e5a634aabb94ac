"""The rivals with curvature follow, on fixed random data, plain loops written from their formulas.

Official sources are named in the recipes' origins. Settings that make ours and theirs equal are the
defaults, except where a docstring says so.
"""

import inspect

import pytest
import torch

import gomuon
from tests.methods import references
from tests.methods.references.data import SHAPES, relative_error
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
