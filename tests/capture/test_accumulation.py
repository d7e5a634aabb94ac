"""Micro-batches give the factors and the step of their union."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from tests.methods.table import RECIPES, make
from tests.models import SYMBOLS, transformer

Micro = list[tuple[Tensor, Tensor]]
NAME = "trunk.blocks.0.mlp.gate.weight"


def batches(sizes: tuple[int, ...], step: int) -> Micro:
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(0, SYMBOLS, (sum(sizes), 11), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in windows.split(sizes)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def summed(model: nn.Module, micro: Micro) -> None:
    for batch in micro:
        loss_of(model, batch, "sum").backward()


def averaged(model: nn.Module, micro: Micro) -> None:
    """Each micro-batch's mean, not divided by their number: n times the union's mean."""
    for batch in micro:
        loss_of(model, batch, "mean").backward()


def averaged_and_divided(model: nn.Module, micro: Micro) -> None:
    for batch in micro:
        (loss_of(model, batch, "mean") / len(micro)).backward()


def weighted_by_counts(model: nn.Module, micro: Micro) -> None:
    total = sum(len(x) for x, _ in micro)
    for batch in micro:
        (loss_of(model, batch, "mean") * len(batch[0]) / total).backward()


def all_forwards_first(model: nn.Module, micro: Micro) -> None:
    """Several forward passes wait for their backward passes at once."""
    losses = [loss_of(model, batch, "mean") / len(micro) for batch in micro]
    for loss in losses:
        loss.backward()


CASES = [
    (summed, "sum", (2, 2, 2), 1.0),
    (averaged, "mean", (2, 2, 2), 3.0),
    (averaged_and_divided, "mean", (2, 2, 2), 1.0),
    (averaged_and_divided, "mean", (1, 1, 1, 1, 1, 1), 1.0),
    (weighted_by_counts, "mean", (1, 3, 2), 1.0),
    (all_forwards_first, "mean", (3, 3), 1.0),
]


@pytest.mark.parametrize(("backward", "reduction", "sizes", "scale"), CASES)
def test_micro_batches_equal_their_union(
    backward: Callable[[nn.Module, Micro], None],
    reduction: str,
    sizes: tuple[int, ...],
    scale: float,
) -> None:
    parts, whole = transformer(layers=1), transformer(layers=1)
    # AdamW's ε is not blind to the loss's scale, so it rests.
    first = GoMuon(parts, refresh_every=2, loss_reduction=reduction, adamw={"lr": 0.0})
    second = GoMuon(whole, refresh_every=2, loss_reduction=reduction, adamw={"lr": 0.0})
    for step in range(6):
        first.zero_grad()
        second.zero_grad()
        backward(parts, batches(sizes, step))
        loss_of(whole, batches((sum(sizes),), step)[0], reduction).backward()
        first.step()
        second.step()
    for (name, p), q in zip(parts.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(p, q[1], rtol=1e-10, atol=1e-11, msg=name)
    ours, theirs = (o.state[m.get_parameter(NAME)] for o, m in ((first, parts), (second, whole)))
    # An undivided sum of n means is n times the union's mean: B is n² times as large, throughout.
    torch.testing.assert_close(
        ours["left_factor"], scale**2 * theirs["left_factor"], rtol=1e-10, atol=0
    )


# These amplify rounding, by what they are; docs/compatibility.md says by how much.
AMPLIFYING = {"SOAP", "SOAPMuon", "KLSOAP", "Shampoo", "Mousse", "MuonSquared"}

# At QSD's own scale, line searches along weak directions make 1.7e-11 of it; here they make 9e-13.
SETTINGS: dict[str, dict[str, Any]] = {"QSD": {"scale": 10.0}}


def in_halves_and_whole(method: str, steps: int, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """One model trained on two halves of each batch, and one on the whole."""
    parts, whole = transformer(layers=1), transformer(layers=1)
    first, second = make(method, parts, **settings), make(method, whole, **settings)
    for step in range(steps):
        first.zero_grad()
        second.zero_grad()
        averaged_and_divided(parts, batches((3, 3), step))
        averaged_and_divided(whole, batches((6,), step))
        first.step()
        second.step()
    return parts, whole


@pytest.mark.parametrize("method", sorted({name for name, _ in RECIPES} - AMPLIFYING))
def test_micro_batches_stay_with_their_union_for_thirty_steps(method: str) -> None:
    parts, whole = in_halves_and_whole(method, 30, **SETTINGS.get(method, {}))
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_statistics_of_all_but_the_last_micro_batch_are_not_lost() -> None:
    """The comparison above can fail: one micro-batch alone gives another step."""
    parts, last = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(parts), GoMuon(last)
    averaged_and_divided(parts, batches((3, 3), 0))
    averaged_and_divided(last, batches((3, 3), 0)[1:])
    first.step()
    second.step()
    assert not torch.allclose(parts.get_parameter(NAME), last.get_parameter(NAME), rtol=1e-3)


def test_clipping_leaves_the_statistics_alone() -> None:
    """Clipped or not, B is that of the loss; only the momentum sees shorter gradients."""
    clipped, free = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(clipped), GoMuon(free)
    for model, optimizer in ((clipped, first), (free, second)):
        averaged(model, batches((4,), 0))
        if model is clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    ours, theirs = (o.state[m.get_parameter(NAME)] for o, m in ((first, clipped), (second, free)))
    torch.testing.assert_close(ours["left_factor"], theirs["left_factor"])
    torch.testing.assert_close(clipped.get_parameter(NAME), free.get_parameter(NAME))
