"""A team on its own, without an optimizer: one process computes everything and sends nothing."""

import pytest
import torch
from torch import nn

from gomuon.distributed.team import ALONE
from gomuon.distributed.team_finder import TeamFinder
from gomuon.geometry.base import Geometry
from gomuon.moments import Moment, MomentShapes, Statistics
from gomuon.parameters.layout import Layout, MatrixParameter
from gomuon.parameters.specs import LayerSpec
from gomuon.parameters.stacks import Participants


def one_owner(ranks: int) -> dict[torch.Tensor, int]:
    raise AssertionError("nobody alone asks for owners")


def test_alone_every_layer_is_computed_here_and_sums_stay_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    state: dict[str, object] = {}
    matrix = MatrixParameter("weight", weight, state, LayerSpec(heads=2), phase=0.5)
    (layer,), owned = ALONE.layers([matrix], one_owner)
    assert (layer.shape, layer.blocks, layer.phase, list(owned)) == ((2, 6), 2, 0.5, [])
    assert layer.state is state

    one = torch.ones((), dtype=torch.float64)
    seen: dict[torch.Tensor, Statistics] = {
        weight: Statistics(Moment(torch.eye(6), one, one), None)
    }
    assert ALONE.sum_statistics([], seen, {weight: MomentShapes((6, 6), None)}) is seen
    assert ALONE.total(one) is one
    assert ALONE.local(weight) is weight
    assert (ALONE.any(True), ALONE.any(False), ALONE.owners(one_owner)) == (True, False, {})


def test_alone_an_exception_is_not_changed_and_a_fault_is_this_ranks() -> None:
    assert ALONE.agree(lambda: ("a fault", {}), "Muon", []) == ("a fault", {})
    with (
        pytest.raises(ZeroDivisionError) as failure,
        ALONE.fail_together(Participants([], [], []), {}),
    ):
        raise ZeroDivisionError
    assert not getattr(failure.value, "__notes__", ())


def test_without_a_process_group_the_team_is_one_and_does_not_change() -> None:
    finder = TeamFinder(None, Layout(), Geometry(), {"work": "shared"})
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))]}]
    assert finder.team(groups) == (ALONE, False)
    assert finder.team(groups) == (ALONE, False)
    assert not finder.may_be_wrapped
