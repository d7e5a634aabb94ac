"""Every method with inverse roots: its steps by products are those by decomposition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.methods.halfspace import halfspace_direction
from gomuon.methods.mousse import trace_normalised_roots
from gomuon.methods.shampoo import ridge_roots
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.functional.matrices import distance, normal, random_source
from tests.methods.table import assert_equal, saved
from tests.models import train, transformer

WITH_ROOTS = [name for name, kind in METHODS.items() if "roots" in kind.recipe.settings]
# These need eigenvectors, which products estimate: see test_bases_by_products.py.
ESTIMATED = {"KFAC", "SOAP", "SOAPMuon", "KLSOAP"}
# Where rounding decides the smallest eigenvalues, damping that is above it.
DAMPED: dict[str, dict[str, Any]] = {"Mousse": {"epsilon": 1e-3}, "Shampoo": {"ridge": 1e-3}}


def trained(name: str, dtype: torch.dtype, steps: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """All weights before and after, in float64."""
    model = transformer(layers=1, dtype=dtype)
    known = METHODS[name].recipe.settings
    chosen = {"refresh_every": 2, "polar": "svd", **DAMPED.get(name, {}), **settings}
    kind: type[MatrixOptimizer] = METHODS[name]
    optimizer = kind(model, **{key: chosen[key] for key in chosen if key in known})

    def weights() -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    before = weights()
    train(model, optimizer, range(steps))
    return before, weights()


@pytest.mark.parametrize("name", [name for name in WITH_ROOTS if name not in ESTIMATED])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-4), (torch.float64, 1e-8)])
def test_the_steps_are_those_by_decomposition(name: str, dtype: torch.dtype, bound: float) -> None:
    # Shampoo's ridge is a share of λ_max, which products know to a few per cent.
    bound = 1e-3 if name == "Shampoo" else bound
    # Few steps: over many, all rounding errors grow, in whatever form.
    before, exact = trained(name, dtype, 3, roots="eigh")
    _, found = trained(name, dtype, 3, roots="products")
    assert float((found - exact).norm()) < bound * float((exact - before).norm())
    assert not torch.equal(found, exact)


def test_a_cap_on_the_condition_number_is_the_same_in_both_forms_and_matters() -> None:
    before, free = trained("GoMuon", torch.float64, 3, roots="eigh")
    _, exact = trained("GoMuon", torch.float64, 3, roots="eigh", max_condition=5.0)
    _, found = trained("GoMuon", torch.float64, 3, roots="products", max_condition=5.0)
    moved = float((free - before).norm())
    assert float((found - exact).norm()) < 5e-3 * moved
    assert float((free - exact).norm()) > 5e-2 * moved


def gram(d: int, rank: int) -> Tensor:
    G = normal(d, rank, random_source(0)).float()
    return (G @ G.mT).unsqueeze(0)


@pytest.mark.parametrize(("rank", "bound"), [(8, 0.03), (96, 0.03), (200, 1e-4)])
def test_shampoos_ridge_without_float64(rank: int, bound: float) -> None:
    """Decomposed, S is widened to float64. Products keep float32 and lose this much.

    At rank 96 the smallest eigenvalue, and at rank 8 most of them, are about as small as the ridge.
    """
    S = gram(96, rank)
    settings = {"ridge": 1e-6, "epsilon": 0.0, "power": 0.25}
    root, prepared = ridge_roots(1, {**settings, "factor_decay": 0.999, "bias_correction": False})
    assert root.multiplied is not None
    roots, fine = root.multiplied(prepared(S))
    assert roots.dtype == torch.float32
    assert bool(fine.all())
    exact = S[0].double()
    values, V = torch.linalg.eigh(exact)
    ridged = values.clamp_min(0) + 1e-6 * values[-1]
    assert distance(roots[0].double(), (V * ridged**-0.25) @ V.mT) < bound


def test_mousses_epsilon_is_added_twice_in_both_forms() -> None:
    root, prepared = trace_normalised_roots(
        1, {"factor_decay": 0.5, "epsilon": 0.5, "alpha": 0.125}
    )
    S = prepared(gram(40, 100))
    assert root.multiplied is not None
    assert distance(root.multiplied(S)[0], root.decomposed(S)) < 1e-5


@pytest.mark.parametrize("method", ["svd", "canonical", "fast"])
def test_the_nuclear_norm_is_that_of_the_polar_factor(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-space that accelerators use is that of the CPU."""
    source = random_source(1)
    M, left, right = normal(6, 9, source), *(normal(d, d, source) for d in (6, 9))
    left, right = left @ left.mT, right @ right.mT
    exact = halfspace_direction(M, left, right, tau=0.9, polar_method=method)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a nuclear norm")

    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    monkeypatch.setattr("gomuon.methods.halfspace.attempt", refuse)
    found = halfspace_direction(M, left, right, tau=0.9, polar_method=method)
    # The fast polar factor knows the nuclear norm as well as it knows singular values.
    assert distance(found, exact) < (0.02 if method == "fast" else 1e-6)
    assert float((M * found).sum()) >= 0.899 * float(torch.linalg.matrix_norm(M, "nuc"))


@pytest.mark.parametrize("name", WITH_ROOTS)
def test_a_run_by_products_resumes_bit_for_bit(name: str) -> None:
    settings: dict[str, Any] = {"roots": "products"}
    if "refresh_every" in METHODS[name].recipe.settings:
        settings["refresh_every"] = 3
    whole, half = transformer(layers=1), transformer(layers=1)
    train(whole, METHODS[name](whole, **settings), range(8))
    first = METHODS[name](half, **settings)
    train(half, first, range(4))
    again = METHODS[name](half, **settings)
    again.load_state_dict(saved(first.state_dict()))
    train(half, again, range(4, 8))
    assert_equal(whole, half)
