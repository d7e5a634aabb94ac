"""What gradient clipping changes, as docs/clipping.md says: lengths, not directions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gomuon
from gomuon import GoMuon
from gomuon.optimizer import MatrixOptimizer
from tests.models import language_loss, transformer

EXACT = ["GoMuon", "Muon", "Mousse", "NewtonMuon", "MuonPlus", "Scion", "KFACMuon", "MatchedKFAC",
         "MuonQK", "Halfspace"]  # fmt: skip
STEPS = 6


def trained(
    kind: type[MatrixOptimizer], factors: Sequence[float], **settings: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices and the other parameters after steps whose gradients had these factors."""
    model = transformer(layers=2)
    optimizer = kind(model, **settings)
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        optimizer.step()
    table = optimizer.routing_table()
    matrices, others = (
        [row.parameter.detach() for row in table.treated(treatment)]
        for treatment in ("matrix", "adamw")
    )
    return matrices, others


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# AdamW's part stands still: its ε makes it feel the length, and matrices see what it moves.
STILL: dict[str, Any] = {"adamw": {"lr": 0.0}}


@pytest.mark.parametrize("name", EXACT)
def test_one_factor_on_all_gradients_changes_no_bit_of_a_matrix(name: str) -> None:
    kind = getattr(gomuon, name)
    plain, _ = trained(kind, [1.0] * STEPS, **STILL)
    scaled, _ = trained(kind, [1 / 8] * STEPS, **STILL)  # a power of two, which rounds nothing
    assert equal(plain, scaled)


def test_malt_changes_by_rounding_alone() -> None:
    plain, _ = trained(gomuon.MALT, [1.0] * STEPS, **STILL)
    scaled, _ = trained(gomuon.MALT, [1 / 8] * STEPS, **STILL)
    torch.testing.assert_close(plain, scaled, rtol=1e-12, atol=1e-14)


def test_a_single_clipped_step_weighs_less_in_the_momentum() -> None:
    factors = [1.0, 1.0, 1.0, 1 / 8, 1.0, 1.0]
    plain, _ = trained(GoMuon, [1.0] * STEPS, **STILL)
    clipped, _ = trained(GoMuon, factors, **STILL)
    assert not equal(plain, clipped)
    # Without momentum no step knows the length of another, nor of its own gradient.
    plain, _ = trained(GoMuon, [1.0] * STEPS, momentum=0.0, **STILL)
    clipped, _ = trained(GoMuon, factors, momentum=0.0, **STILL)
    assert equal(plain, clipped)


def test_a_single_long_gradient_moves_matrices_no_further_and_adamws_part_further() -> None:
    moved = []
    for factor in (1.0, 1000.0):
        before, after = (
            trained(GoMuon, [1.0] * 4 + [factor] * (n > 4), lr=0.01, adamw={"lr": 0.01})
            for n in (4, 5)
        )
        moved.append(
            [
                torch.stack([(new - old).norm() for old, new in zip(*both, strict=True)])
                for both in zip(before, after, strict=True)
            ]
        )
    (matrices, others), (long_matrices, long_others) = moved
    torch.testing.assert_close(long_matrices, matrices, rtol=1e-6, atol=0)
    # (1 − β₁)/√(1 − β₂) of the rate for every element, by AdamW's bias-corrected moments
    assert bool((long_others > 1.1 * others).any())


def test_clipping_leaves_captured_factors_alone() -> None:
    factors = []
    for clips in (False, True):
        model = transformer(layers=2)
        optimizer = GoMuon(model, **STILL)
        language_loss(model, 0).backward()
        if clips:
            before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            assert before > 1e-3
        optimizer.step()
        state = [dict(entries) for entries in optimizer.state.values()]
        factors.append([v for s in state for k, v in s.items() if k.endswith(("factor", "map"))])
    assert len(factors[0]) > 10
    assert equal(*factors)
