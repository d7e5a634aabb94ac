"""Long sides: captured methods follow plain loops with explicit block-diagonal factors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon import GoMuon, Halfspace, LayerSpec
from gomuon.methods.halfspace import halfspace_direction
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.watching.layer_updates import LayerUpdate
from tests.methods import references
from tests.methods.references.cut_sides import WHOLE, CutSide
from tests.methods.references.data import ROWS, layer, learn, relative_error, rows

CAPTURING = [name for name, kind in METHODS.items() if kind.recipe.geometry.uses_moments]
DIAGONAL = CutSide(diagonal=True)
# Settings and LayerSpecs for a matrix 11 × 18, and how its sides are then cut. 11 is a prime, so
# that its last block is shorter than the others.
CUTS: dict[str, tuple[dict[str, Any], LayerSpec, tuple[CutSide, CutSide]]] = {
    "equal": ({"block_size": 6}, LayerSpec(outputs="whole"), (WHOLE, CutSide((6, 6, 6)))),
    "uneven": ({"block_size": 4}, LayerSpec(inputs="whole"), (CutSide((4, 4, 3)), WHOLE)),
    "both": ({"block_size": 4}, LayerSpec(), (CutSide((4, 4, 3)), CutSide((3,) * 6))),
    "own": ({}, LayerSpec(outputs=3, inputs=9), (CutSide((3, 3, 3, 2)), CutSide((9, 9)))),
    "block": ({}, LayerSpec(block=6), (CutSide((6, 5)), CutSide((6, 6, 6)))),
    "numbers": ({"block_size": 1}, LayerSpec(), (CutSide((1,) * 11), CutSide((1,) * 18))),
    "long": ({"max_side": 11, "long_sides": "diagonal"}, LayerSpec(), (WHOLE, DIAGONAL)),
    "diagonal": (
        {"block_size": 4},
        LayerSpec(outputs="diagonal"),
        (DIAGONAL, CutSide((3,) * 6)),
    ),
    "diagonals": ({"max_side": 1, "long_sides": "diagonal"}, LayerSpec(), (DIAGONAL, DIAGONAL)),
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {"refresh_every": 3}),
    ("GoMuon", {"refresh_every": 2, "input_decay": 0.9, "shrinkage": {"damping": 0.05}}),
    ("GoMuon", {"refresh_every": 2, "weight_decay": 0.5, "geometry_decay": True}),
    ("KFAC", {"kl_clip": 0.1, "statistics_every": 2, "refresh_every": 3}),
    ("MatchedKFAC", {"refresh_every": 3, "damping": 0.1}),
    ("NewtonMuon", {"refresh_every": 3}),
]


def follow(
    optimizer: MatrixOptimizer, module: nn.Linear, reference: references.Reference, steps: int = 12
) -> float:
    """Train both side by side; the relative distance of the weights."""
    m, n = module.weight.shape
    for step in range(steps):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        learn(optimizer, module, x, g)
        reference.step(g.T @ x, x, g)
    return relative_error(module.weight, reference.W)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("method", "settings"), SETTINGS, ids=[f"{m}-{len(s)}" for m, s in SETTINGS]
)
def test_a_cut_side_follows_the_plain_loop(method: str, settings: dict[str, Any], cut: str) -> None:
    long, spec, (left, right) = CUTS[cut]
    module = layer(11, 18)
    optimizer = getattr(gomuon, method)(
        module, specs={"weight": spec}, loss_reduction="sum", **settings, **long
    )
    reference = getattr(references, method)(module.weight.detach(), **settings)
    reference.left, reference.right = left, right
    assert follow(optimizer, module, reference) < 1e-8


def test_the_blocks_matter() -> None:
    """Without a cut the same training goes elsewhere."""
    weights = []
    for size in (None, 6):
        module = layer(11, 18)
        optimizer = GoMuon(module, block_size=size)
        for step in range(4):
            learn(optimizer, module, rows(2 * step, ROWS, 18), rows(2 * step + 1, ROWS, 11))
        weights.append(module.weight.detach())
    assert relative_error(*weights) > 1e-3


@pytest.mark.parametrize("method", CAPTURING)
def test_sides_up_to_the_block_size_are_not_cut(method: str) -> None:
    weights = []
    for size in (None, 18):
        module = layer(11, 18)
        optimizer = METHODS[method](module, block_size=size)
        for step in range(4):
            learn(optimizer, module, rows(2 * step, ROWS, 18), rows(2 * step + 1, ROWS, 11))
        weights.append(module.weight.detach())
    assert torch.equal(*weights)


# ---- one-sided geometry --------------------------------------------------------------------------


def trained(make: Callable[[nn.Module], MatrixOptimizer]) -> tuple[nn.Linear, MatrixOptimizer]:
    module = layer(11, 18)
    optimizer = make(module)
    for step in range(9):
        learn(optimizer, module, rows(2 * step, ROWS, 18), rows(2 * step + 1, ROWS, 11))
    return module, optimizer


def test_a_long_side_stays_at_the_identity() -> None:
    """max_side=11 leaves the inputs' side out, as alpha=(¼, 0) does."""
    one, optimizer = trained(lambda module: GoMuon(module, max_side=11))
    other, _ = trained(lambda module: GoMuon(module, alpha=(0.25, 0.0)))
    assert torch.equal(one.weight, other.weight)
    assert {"right_map", "right_factor"}.isdisjoint(optimizer.state[one.weight])
    spec = LayerSpec(outputs="identity")
    one, _ = trained(lambda module: GoMuon(module, specs={"weight": spec}))
    other, _ = trained(lambda module: GoMuon(module, alpha=(0.0, 0.25)))
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("method", CAPTURING)
def test_without_any_side_nothing_is_captured_and_nothing_is_said(
    method: str, recwarn: pytest.WarningsRecorder
) -> None:
    module, optimizer = trained(lambda module: METHODS[method](module, max_side=1))
    assert not module._forward_hooks
    assert not any(key.endswith(("factor", "map")) for key in optimizer.state[module.weight])
    assert not recwarn.list


def test_matched_kfac_balances_with_an_identity() -> None:
    """π² = tr A/n where B is the identity, and the other way round."""
    specs = {"right": LayerSpec(outputs="identity"), "left": LayerSpec(inputs="identity")}
    for (where, spec), d in zip(specs.items(), (18, 11), strict=True):
        module = layer(11, 18)
        optimizer = gomuon.MatchedKFAC(module, specs={"weight": spec}, damping=0.1)
        learn(optimizer, module, rows(0, ROWS, 18), rows(1, ROWS, 11))
        state = optimizer.state[module.weight]
        S, P = state[f"{where}_factor"][0], state[f"{where}_map"][0]
        expected = S + (0.1 * S.trace() / d).sqrt() * torch.eye(d, dtype=S.dtype)
        torch.testing.assert_close(torch.linalg.inv(P @ P), expected)
        assert len([key for key in state if key.endswith("_map")]) == 1


def test_kfac_has_eigenvalues_of_one_on_the_other_side() -> None:
    module = layer(11, 18)
    spec = LayerSpec(inputs="identity")
    optimizer = gomuon.KFAC(module, specs={"weight": spec}, kl_clip=None, momentum=0.0, lr=1.0)
    before = module.weight.detach().clone()
    x, g = rows(0, ROWS, 18), rows(1, ROWS, 11)
    learn(optimizer, module, x, g)
    B = optimizer.state[module.weight]["left_factor"][0]
    expected = torch.linalg.solve(B + 1e-3 * torch.eye(11, dtype=B.dtype), g.T @ x)
    torch.testing.assert_close(before - module.weight.detach(), expected)


# ---- Halfspace, which has no plain reference of its own ------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"block_size": 4}, {"max_side": 11, "long_sides": "diagonal"}]
)
def test_the_half_space_direction_uses_the_cut_maps(settings: dict[str, Any]) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def observe(layer: LayerUpdate) -> None:
        seen.append((layer.source, layer.update, layer.left_map, layer.right_map))

    def make(module: nn.Module) -> MatrixOptimizer:
        optimizer = Halfspace(module, polar="svd", **settings)
        optimizer.add_observer(observe)
        return optimizer

    trained(make)
    for source, U, left, right in seen:
        expected = halfspace_direction(source, dense(left, 11), dense(right, 18))
        torch.testing.assert_close(U, expected, rtol=1e-9, atol=1e-11)


def dense(P: Tensor | None, d: int) -> Tensor:
    assert P is not None
    if d in P.shape[-2:] and P.shape[-1] != P.shape[-2]:
        return torch.diag(P.flatten()).unsqueeze(0)
    whole = P[0] if P.ndim == 3 else torch.block_diag(*P[0])
    return whole[:d, :d].unsqueeze(0)
