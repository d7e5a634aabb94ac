"""AdamW's part: any memory layout, any rate of the group, nothing written that is no parameter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gomuon import Muon

pytestmark = pytest.mark.filterwarnings("ignore:.*given parameters, not a model.*")

# How a parameter may lie in memory: the memory it is part of -> the parameter.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "column of a matrix": ((6, 3), lambda b: b[:, 0]),
    "every second element": ((12,), lambda b: b[::2]),
    "transposed": ((4, 6), lambda b: b.mT),
    "slice of a transposed": ((4, 6), lambda b: b.mT[1:5, ::2]),
    "channels last": ((2, 3, 4, 5), lambda b: b.contiguous(memory_format=torch.channels_last)),
    "rows of a matrix": ((6, 4), lambda b: b[2:4]),
    "contiguous": ((6, 4), lambda b: b),
}
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(parameter: nn.Parameter, strided_gradient: bool, count: int = 4) -> None:
    optimizer = Muon(
        [{"params": [parameter], "treatment": "adamw", "lr": 0.1, "weight_decay": 0.01}]
    )
    for step in range(count):
        gradient = values(tuple(parameter.shape), 100 + step).to(parameter.dtype)
        parameter.grad = gradient
        if strided_gradient:  # in another order than the parameter's, as autograd may leave it
            parameter.grad = gradient.flatten().repeat_interleave(2)[::2].view_as(gradient)
        optimizer.step()


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strided_gradient", [False, True])
def test_a_layout_changes_nothing(layout: str, dtype: torch.dtype, strided_gradient: bool) -> None:
    shape, part = LAYOUTS[layout]
    memory = values(shape, 0).to(dtype)
    parameter = nn.Parameter(part(memory))
    plain = nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    steps(parameter, strided_gradient)
    steps(plain, strided_gradient=False)
    assert parameter.stride() == part(memory).stride()
    assert torch.equal(parameter, plain)
    assert not torch.equal(parameter, part(values(shape, 0).to(dtype)))


@EVERY_LAYOUT
def test_memory_that_belongs_to_no_parameter_stays(layout: str) -> None:
    shape, part = LAYOUTS[layout]
    memory = values(shape, 0)
    around = torch.ones_like(memory, dtype=torch.bool)
    part(around).fill_(False)
    steps(nn.Parameter(part(memory)), strided_gradient=False)
    assert torch.equal(memory[around], values(shape, 0)[around])


@EVERY_LAYOUT
def test_it_is_torchs_own(layout: str) -> None:
    shape, part = LAYOUTS[layout]
    ours = nn.Parameter(part(values(shape, 0)))
    theirs = nn.Parameter(ours.detach().clone(memory_format=torch.contiguous_format))
    steps(ours, strided_gradient=False)
    torchs = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(4):
        theirs.grad = values(tuple(theirs.shape), 100 + step)
        torchs.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# ---- the rate in a group that mixes treatments ---------------------------------------------------


def moved(
    optimizer_lr: float, group_lr: float, later: float | None = None, **group: float
) -> float:
    """How far one step moves a vector, over AdamW's own rate."""
    vector = nn.Parameter(torch.zeros(3))
    optimizer = Muon([{"params": [vector], "lr": group_lr, **group}], lr=optimizer_lr)
    if later is not None:
        optimizer.param_groups[0]["lr"] = later
    vector.grad = torch.ones(3)
    optimizer.step()
    return float(vector.detach().abs().max()) / 3e-3


@pytest.mark.parametrize("group_lr", [1e-3, 0.02, 5.0])
@pytest.mark.parametrize("optimizer_lr", [1e-28, 0.0, 0.02, 1e6])
def test_the_constructors_rate_does_not_reach_a_group_with_its_own(
    optimizer_lr: float, group_lr: float
) -> None:
    assert moved(optimizer_lr, group_lr) == pytest.approx(1.0, rel=1e-4)


def test_it_moves_in_proportion_to_the_groups_rate() -> None:
    assert moved(0.02, 0.1, later=0.05) == pytest.approx(0.5, rel=1e-4)
    assert moved(0.02, 0.1, later=0.0) == 0.0
    assert moved(0.02, 0.1, base_lr=0.05) == pytest.approx(2.0, rel=1e-4)


def test_a_group_that_begins_at_rest_is_measured_against_the_methods_own_rate() -> None:
    assert moved(0.02, 0.0, later=0.02) == pytest.approx(1.0, rel=1e-4)


def test_an_impossible_base_is_refused() -> None:
    with pytest.raises(ValueError, match="base_lr must be a number > 0, got 0"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "base_lr": 0.0}])
