"""Every method follows, on fixed random data, the plain reference written from its formula."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon.methods.mousse import trace_normalised_roots
from gomuon.methods.shampoo import ridge_roots
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.sampling import spread_rows
from tests.methods import references
from tests.methods.references.data import ROWS, SHAPES, flat, layer, learn, relative_error, rows
from tests.methods.references.kfac import step_together
from tests.methods.references.rotated import graft_as_a_whole

PRECISIONS = [(torch.float64, 30, 1e-8), (torch.float32, 10, 1e-3)]


@dataclass(frozen=True)
class Case:
    """A method with settings for it and for its reference; `float32` changes some of them.

    A factor of a wide or tall gradient is singular at first, and its null space then weighs what
    the regularisation says. That must stand above roundoff, or there is nothing to compare.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    float32: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join((self.method, *(f"{key}={value}" for key, value in self.settings.items())))

    def optimizer(
        self, model: nn.Module, dtype: torch.dtype = torch.float64, polar: str = "exact"
    ) -> MatrixOptimizer:
        kind = getattr(gomuon, self.method)
        chosen = {"polar": polar} if "polar" in kind.recipe.settings else {}
        made = kind(model, loss_reduction="sum", **chosen, **self.settings_for(dtype))
        assert isinstance(made, MatrixOptimizer)
        return made

    def reference(
        self, W: Tensor, dtype: torch.dtype = torch.float64, **others: Any
    ) -> references.Reference:
        made = getattr(references, self.method)(
            W.detach().double(), **self.settings_for(dtype), **others
        )
        assert isinstance(made, references.Reference)
        return made

    def settings_for(self, dtype: torch.dtype) -> dict[str, Any]:
        return {**self.settings, **(self.float32 if dtype == torch.float32 else {})}


CORRECTED: dict[str, Any] = {
    "gradient_decay": 0.9,
    "bias_correction": True,
    "factor_decay": 0.9,
    "ridge": 0.0,
}
CASES = [
    Case("Muon"),
    Case("Muon", {"nesterov": False, "momentum": 0.95, "weight_decay": 0.1}),
    Case("GoMuon"),
    Case("GoMuon", {"refresh_every": 3, "input_decay": 0.9, "weight_decay": 0.1}),
    Case("GoMuon", {"shrinkage": {"damping": 0.05}}),
    Case("GoMuon", {"refresh_every": 1, "weight_decay": 0.5, "geometry_decay": True}),
    Case("GoMuon", {"alpha": (0.0, 0.25)}),
    Case("GoMuon", {"alpha": (0.0, 0.25), "weight_decay": 0.5, "geometry_decay": True}),
    Case("GoMuon", {"alpha": 0.5, "graft": None, "nesterov": False, "input_decay": 0.5}),
    Case("KFAC"),
    Case("KFAC", {"kl_clip": None, "statistics_every": 2, "refresh_every": 3, "lr": 1e-3}),
    Case("KFAC", {"kl_clip": 1e6, "damping": 0.1, "factor_decay": 0.5, "weight_decay": 0.1}),
    Case("KFAC", {"kl_clip": 0.1, "statistics_every": 3, "refresh_every": 2, "momentum": 0.0}),
    Case("Shampoo", float32={"ridge": 1e-3}),
    Case("Shampoo", {"statistics_every": 2, "refresh_every": 3, "graft": "sgd", "ridge": 1e-3}),
    Case("Shampoo", {"factor_decay": 1.0, "graft": "adagrad", "ridge": 1e-3, "power": 0.5}),
    Case("Shampoo", {"graft": None, "nesterov": False, "refresh_every": 1, "ridge": 1e-2}),
    Case("Shampoo", {"momentum": 0.0, "weight_decay": 0.1, "ridge": 1e-2, "refresh_every": 4}),
    Case("Shampoo", {"factor_decay": 0.9, "start": 1e-2, "refresh_every": 3}),
    Case("Shampoo", {"refresh_at": "last", "refresh_every": 4, "ridge": 1e-2, "momentum": 0.5}),
    Case("Shampoo", {**CORRECTED, "refresh_at": "last", "refresh_every": 3, "epsilon": 1e-3}),
    Case("Shampoo", {**CORRECTED, "graft": None, "epsilon": 1e-3, "refresh_every": 2}),
    Case("Mousse", {"epsilon": 1e-5}, float32={"epsilon": 1e-2}),
    Case("Mousse", {"epsilon": 0.1, "refresh_every": 3, "alpha": 0.25, "aspect": "max"}),
    Case("Mousse", {"epsilon": 0.1, "refresh_every": 1, "nesterov": True, "factor_decay": 0.8}),
    Case("FISMO"),
    Case("FISMO", {"nesterov": True, "factor_decay": 0.8, "mu": 0.1, "weight_decay": 0.1}),
    Case("NewtonMuon"),
    Case("NewtonMuon", {"refresh_every": 3, "damping": 0.01, "factor_decay": 0.5}),
    Case("NewtonMuon", {"refresh_every": 3, "lr": 4e-3, "aspect": "longest"}),
    Case("NewtonMuon", {"refresh_every": 3, "refresh_at": "first"}),
    Case("NewtonMuon", {"refresh_every": 4, "nesterov": False, "weight_decay": 0.1}),
    Case("MuonSquared"),
    Case("MuonSquared", {"square_decay": 0.5, "nesterov": False, "momentum": 0.8}),
    Case("MALT"),
    Case("MALT", {"alpha": 0.5, "factor_decay": 0.5, "nesterov": False, "weight_decay": 0.1}),
    *(Case("MuonPlus", {"normalise": way}) for way in ("none", "col", "row", "col_row", "row_col")),
    Case("MuonPlus", {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0}),
    Case("MuonEq"),
    Case("MuonEq", {"equilibrate": "col"}),
    Case("MuonEq", {"equilibrate": "row_col", "nesterov": False, "momentum": 0.8}),
    Case("Scion"),
    Case("Scion", {"radius": 3.0, "momentum": 0.5, "lr": 0.1}),
    Case("Scion", {"constrained": False, "momentum": 0.9}),
    *(
        Case(method, settings)
        for method in ("KFACMuon", "MatchedKFAC")
        for settings in (
            {},
            {"refresh_every": 3, "damping": 0.1, "scale": 1.0, "factor_decay": 0.5},
            {"refresh_every": 4, "nesterov": False, "weight_decay": 0.1},
        )
    ),
    Case("KFACMuon", {"refresh_every": 3, "refresh_at": "first", "damping": 0.1}),
]
# SOAP's bases are not unique on a singular factor: square, and sides that go without.
SOAP_CASES = [
    (Case("SOAP"), "square"),
    (Case("SOAP", {"refresh_every": 3, "betas": (0.9, 0.99), "weight_decay": 0.1}), "square"),
    (Case("SOAP", {"refresh_every": 1, "factor_decay": 0.5, "eps": 1e-3}), "square"),
    *((Case("SOAP", {"refresh_every": 3, "max_side": 4}), shape) for shape in SHAPES),
]


def follow(
    case: Case,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    steps: int = 30,
    between: tuple[int, ...] = (ROWS,),
    polar: str = "exact",
) -> Iterator[tuple[nn.Linear, MatrixOptimizer, references.Reference]]:
    """Train one layer and its reference side by side; what they are after every update.

    `between` are the sizes before the features: rows, or examples and positions.
    """
    (m, n), module = shape, layer(*shape, dtype)
    optimizer = case.optimizer(module, dtype, polar)
    reference = case.reference(module.weight, dtype)
    for step in range(steps):
        x = rows(2 * step, *between, n, dtype=dtype)
        g = rows(2 * step + 1, *between, m, dtype=dtype)
        learn(optimizer, module, x, g)
        x, g = x.double(), g.double()
        reference.step(flat(g).T @ flat(x), x, g)
        yield module, optimizer, reference


def assert_follows(case: Case, shape: tuple[int, int], tolerance: float = 1e-8, **how: Any) -> None:
    start = layer(*shape).weight.detach().clone()
    for step, (module, _, reference) in enumerate(follow(case, shape, **how)):
        error = relative_error(module.weight, reference.W)
        assert error < tolerance, f"update {step}: {error:.2e}"
    assert relative_error(module.weight, start) > 1e-3, "it went nowhere"


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_its_reference(
    case: Case, shape: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    assert_follows(case, SHAPES[shape], tolerance, dtype=dtype, steps=steps)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_the_fast_polar_factor_it_stays_near_its_reference(case: Case, shape: str) -> None:
    """The distance of the default in float32 from the truth."""
    assert_follows(case, SHAPES[shape], 0.03, dtype=torch.float32, steps=10, polar="fast")


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("case", "shape"), SOAP_CASES, ids=str)
def test_soap_follows_its_reference(
    case: Case, shape: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    assert_follows(case, SHAPES[shape], tolerance, dtype=dtype, steps=steps)


@pytest.mark.parametrize("method", sorted({case.method for case in CASES} | {"SOAP"}))
def test_defaults_are_the_published_ones(method: str) -> None:
    ours = getattr(gomuon, method)
    shown = inspect.signature(ours).parameters
    theirs = inspect.signature(getattr(references, method)).parameters
    published = {name: p.default for name, p in theirs.items() if name != "W"}
    assert {name: ours.recipe.defaults[name] for name in published} == published
    assert {name: shown[name].default for name in published} == published


CAPTURING = ["GoMuon", "KFAC", "NewtonMuon", "KFACMuon", "MatchedKFAC"]


@pytest.mark.parametrize("method", CAPTURING)
def test_a_mean_loss_is_undone(method: str) -> None:
    """Divided by the number of rows, a loss gives the reference's G/N and the same δ."""
    case, module = Case(method, {"refresh_every": 2}), layer(4, 6)
    reference = case.reference(module.weight)
    optimizer = getattr(gomuon, method)(module, **case.settings)
    for step in range(10):
        x, g = rows(2 * step, ROWS, 6), rows(2 * step + 1, ROWS, 4)
        learn(optimizer, module, x, g, weight=1 / ROWS)
        reference.step(g.T @ x / ROWS, x, g)
    assert relative_error(module.weight, reference.W) < 1e-8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positions", [(12, 3), (12, 2, 2)])
@pytest.mark.parametrize("method", ["KFACMuon", "MatchedKFAC"])
def test_kfac_muons_reduce_positions_to_one_row_an_example(
    method: str, shape: str, positions: tuple[int, ...]
) -> None:
    case = Case(method, {"refresh_every": 3})
    assert_follows(case, SHAPES[shape], between=positions)


@pytest.mark.parametrize("method", ["GoMuon", "KFAC", "NewtonMuon"])
def test_the_others_take_every_position_as_a_row(method: str) -> None:
    case, module = Case(method, {"refresh_every": 3}), layer(4, 6)
    optimizer, reference = case.optimizer(module), case.reference(module.weight)
    for step in range(10):
        x, g = rows(2 * step, 5, 3, 6), rows(2 * step + 1, 5, 3, 4)
        learn(optimizer, module, x, g)
        reference.step(flat(g).T @ flat(x), flat(x), flat(g))
    assert relative_error(module.weight, reference.W) < 1e-8


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "kl_clip": None, "lr": 1e-3}])
@pytest.mark.parametrize("shape", SHAPES)
def test_kfac_moves_weight_and_bias_as_one_matrix(shape: str, settings: dict[str, Any]) -> None:
    (m, n), case = SHAPES[shape], Case("KFAC", {"refresh_every": 2, **settings})
    module = layer(m, n, bias=True)
    optimizer = case.optimizer(module)
    reference = case.reference(torch.cat([module.weight, module.bias[:, None]], 1))
    for step in range(30):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        learn(optimizer, module, x, g)
        x = torch.cat([x, torch.ones(ROWS, 1).double()], 1)
        reference.step(g.T @ x, x, g)
    assert relative_error(module.weight, reference.W[:, :-1]) < 1e-8
    assert relative_error(module.bias, reference.W[:, -1]) < 1e-8


class Pair(nn.Module):
    """Two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = layer(4, 6), layer(3, 4)

    def learn(self, optimizer: MatrixOptimizer, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """One update; (G, x, δ) of each layer."""
        seen, loss = [], torch.zeros((), dtype=torch.float64)
        for part, module in enumerate((self.hidden, self.head)):
            m, n = module.weight.shape
            x, g = rows(4 * step + part, ROWS, n), rows(4 * step + 2 + part, ROWS, m)
            loss = loss + (module(x) * g).sum()
            seen.append((g.T @ x, x, g))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return seen


@pytest.mark.parametrize("coupled", [True, False])
def test_the_kl_clip_couples_the_layers(coupled: bool) -> None:
    """One ν for the sum over layers; a ν of each layer's own would show."""
    case, model = Case("KFAC", {"routes": {"*": "matrix"}}), Pair()
    optimizer = case.optimizer(model)
    plain = [references.KFAC(part.weight.detach()) for part in (model.hidden, model.head)]
    for step in range(10):
        seen = model.learn(optimizer, step)
        if coupled:
            step_together(plain, seen)
        else:
            for one, what in zip(plain, seen, strict=True):
                one.step(*what)
    errors = [
        relative_error(part.weight, one.W)
        for part, one in zip((model.hidden, model.head), plain, strict=True)
    ]
    assert max(errors) < 1e-8 if coupled else min(errors) > 1e-4


@pytest.mark.parametrize("constrained", [True, False])
def test_scion_takes_the_sign_at_the_head(constrained: bool) -> None:
    settings: dict[str, Any] = {
        "constrained": constrained,
        "head_radius": 2.0,
        "radius": 3.0,
        "lr": 0.01,
    }
    model = Pair()
    optimizer = Case("Scion", settings).optimizer(model)
    assert [row.treatment for row in optimizer.routing_table()] == ["matrix", "matrix"]
    plain = [
        references.Scion(part.weight.detach(), **settings) for part in (model.hidden, model.head)
    ]
    plain[1].is_head = True
    for step in range(10):
        for one, what in zip(plain, model.learn(optimizer, step), strict=True):
            one.step(*what)
    assert relative_error(model.hidden.weight, plain[0].W) < 1e-8
    assert relative_error(model.head.weight, plain[1].W) < 1e-8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [2, 3, 5])
@pytest.mark.parametrize("graft", ["rmsprop", None])
@pytest.mark.parametrize("graft_by", ["block", "whole"])
def test_shampoo_treats_every_block_as_a_matrix_of_its_own(
    shape: str, block_size: int, graft: str | None, graft_by: str
) -> None:
    """Blocks of block_size², and at the end of a side what is left of it.

    Their lengths are grafted one by one, or together.
    """
    settings: dict[str, Any] = {"graft": graft, "refresh_every": 3, "ridge": 1e-3}
    (m, n), module = SHAPES[shape], layer(*SHAPES[shape])
    optimizer = Case("Shampoo", {**settings, "block_size": block_size}).optimizer(module)
    optimizer.param_groups[0]["graft_by"] = graft_by

    def blocks_of(matrix: Tensor) -> list[Tensor]:
        bands = matrix.split(block_size, 0)
        return [block for band in bands for block in band.split(block_size, 1)]

    blocks = [references.Shampoo(block, **settings) for block in blocks_of(module.weight.detach())]
    for step in range(15):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        learn(optimizer, module, x, g)
        gradients = blocks_of(g.T @ x)
        if graft_by == "whole" and graft is not None:
            graft_as_a_whole(blocks, gradients)
            continue
        for block, G in zip(blocks, gradients, strict=True):
            block.step(G, x, g)
    for ours, block in zip(blocks_of(module.weight), blocks, strict=True):
        assert relative_error(ours, block.W) < 1e-8


@pytest.mark.parametrize("shape", ["wide", "tall", "row"])
def test_soap_follows_its_reference_from_any_eigenbasis(shape: str) -> None:
    """The first Gram of a wide or tall gradient is singular, and any basis of its null space good.

    So the reference goes on from the optimizer's, once they are seen to be eigenvectors.
    """
    case = Case("SOAP", {"refresh_every": 3})
    for step, (module, optimizer, reference) in enumerate(follow(case, SHAPES[shape])):
        assert isinstance(reference, references.SOAP)
        if step == 0:
            state = optimizer.state[module.weight]
            reference.Q_L, reference.Q_R = state["left_basis"][0], state["right_basis"][0]
            for Q, S in ((reference.Q_L, reference.L), (reference.Q_R, reference.R)):
                torch.testing.assert_close(Q.T @ Q, torch.eye(len(Q)).double())
                eigenvalues = torch.linalg.eigvalsh(S).flip(0)
                torch.testing.assert_close(
                    Q.T @ S @ Q, torch.diag(eigenvalues), rtol=0, atol=1e-12 * float(S.trace())
                )
        else:
            assert relative_error(module.weight, reference.W) < 1e-8, step


def thinned(v: Tensor) -> Tensor:
    """What token_stride=2 and token_skip=1 leave of [batch, positions, d]."""
    return flat(v[:, 1::2])


def bounded(v: Tensor) -> Tensor:
    """What rows=7 leaves of [batch, positions, d]."""
    every = flat(v)
    return every[spread_rows(len(every), 7, v.device)]


def averaged(x: Tensor) -> Tensor:
    return x.mean(1)


def summed(delta: Tensor) -> Tensor:
    return delta.sum(1)


@pytest.mark.parametrize("method", ["GoMuon", "KFAC", "NewtonMuon"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    ("settings", "of_inputs", "of_gradients"),
    [
        ({"token_stride": 2, "token_skip": 1}, thinned, thinned),
        ({"rows": 7}, bounded, bounded),
        ({"reduce": True}, averaged, summed),
    ],
    ids=["thinned", "bounded", "reduced"],
)
def test_sampled_statistics(
    method: str,
    reduction: str,
    settings: dict[str, Any],
    of_inputs: Callable[[Tensor], Tensor],
    of_gradients: Callable[[Tensor], Tensor],
) -> None:
    """Statistics of fewer rows, the gradient of all. A mean is one over rows, or over examples."""
    module, (batch, positions) = layer(4, 6), (5, 5)
    N = {"sum": 1, "mean": batch if "reduce" in settings else batch * positions}[reduction]
    optimizer = getattr(gomuon, method)(
        module, refresh_every=2, loss_reduction=reduction, **settings
    )
    reference = Case(method, {"refresh_every": 2}).reference(module.weight)
    for step in range(6):
        x, g = rows(2 * step, batch, positions, 6), rows(2 * step + 1, batch, positions, 4)
        learn(optimizer, module, x, g, weight=1 / N)
        reference.step(flat(g).T @ flat(x) / N, of_inputs(x), of_gradients(g))
    assert relative_error(module.weight, reference.W) < 1e-8


# ---- float32, where roundoff is larger than the published constants ------------------------------


def singular_gram(d: int, rank: int) -> Tensor:
    """A factor as training makes it: of few gradients, in float32."""
    G = torch.randn(d, rank, generator=torch.Generator().manual_seed(0))
    return (G @ G.mT).unsqueeze(0)


def test_shampoos_ridge_is_what_it_says_in_float32() -> None:
    S = singular_gram(96, 8)
    group = {**gomuon.Shampoo.recipe.defaults, "ridge": 1e-6, "power": 0.25}
    root, _ = ridge_roots(1, group)
    found = root.decomposed(S)[0]
    exact = S[0].double()
    largest = torch.linalg.eigvalsh(exact)[-1]
    values, V = torch.linalg.eigh(exact + 1e-6 * largest * torch.eye(96).double())
    want = V @ torch.diag(values**-0.25) @ V.mT
    assert float((found - want).norm() / want.norm()) < 0.05, "the null space's own rounding"
    assert float(torch.linalg.matrix_norm(found, 2) * largest**0.25) > 0.9 * 1e6**0.25


def test_mousse_lifts_eigenvalues_to_epsilon() -> None:
    S = singular_gram(96, 8)
    group = {"factor_decay": 0.5, "epsilon": 1e-5, "alpha": 0.125}
    root, prepared = trace_normalised_roots(1, group)
    found = root.decomposed(prepared(S))[0]
    largest = float(torch.linalg.matrix_norm(found.double(), 2))
    assert 0.7 * 2e-5**-0.125 < largest < 1.01 * 1e-5**-0.125


def test_kfacs_eigenvalues_are_not_negative() -> None:
    """Rounding makes zeros negative; a product of two would then flip the step's sign."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=False)
    optimizer = gomuon.KFAC(linear, factor_decay=0.1, routes={"weight": "matrix"})
    directions = 10 * torch.randn(4, 64)
    for _ in range(12):
        optimizer.zero_grad()
        linear(torch.randn(16, 4) @ directions).square().sum().backward()
        optimizer.step()
    state = optimizer.state[linear.weight]
    assert torch.linalg.eigvalsh(state["right_factor"]).min() < 0, "else this tests nothing"
    for side in ("left", "right"):
        assert state[f"{side}_values"].min() >= 0
