"""Plans of races, from what the user types."""

from __future__ import annotations

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import racing


def test_race_plans_take_what_is_typed() -> None:
    plan = racing.race_plan(
        "grokking", "go-muon, adamw", rates="adamw=.5", seeds="3-5,8", steps=7, modulus=11, width=8
    )
    assert [(arm.name, arm.lr) for arm in plan.arms] == [("go-muon", 0.08), ("adamw", 0.5)]
    assert plan.seeds == (3, 4, 5, 8)
    assert plan.comparisons == (("adamw", "go-muon"),)
    assert plan.timing == ()
    assert racing.race_plan("ptb", "muon").seeds == (0, 1, 2, 3, 4)
    assert racing.race_plan("ptb", "muon").target is None
    aimed = racing.race_plan("ptb", "muon", target=1.5).declaration()
    assert aimed["target"] == 1.5
    assert racing.race_plan("ptb", "muon,soap", timing=True).timing == ("muon", "soap")
    config = plan.config(plan.arms[0], 3, 0.08)
    assert (config.modulus, config.width, config.hidden, config.steps) == (11, 8, 192, 7)
    assert config.adamw_lr == 0.01
    assert racing.race_plan("ptb", "muon").config(plan.arms[0], 0, 0.02).adamw_lr == 0.003


def test_a_target_is_a_positive_loss_and_grokking_has_its_own() -> None:
    with pytest.raises(LabError, match="its own target, 99 % held out"):
        racing.race_plan("grokking", "muon", target=1.0)
    with pytest.raises(LabError, match="--target must be a positive number, not -1"):
        racing.race_plan("ptb", "muon", target=-1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ""}, "--optimizers is empty"),
        ({"names": "muon,muon"}, "has a name twice"),
        ({"rates": "muon=x"}, "'x' is not a number"),
        ({"rates": "muon"}, "'' is not a number"),
        ({"rates": "muon=-1"}, "must be positive"),
        ({"rates": "soap=1"}, "'soap', which is not among"),
        ({"rates": "muon=.1,muon=.2"}, "--lr has muon twice: muon=.1,muon=.2"),
        ({"seeds": "a"}, "--seeds 'a' is not understood"),
        ({"seeds": "5-3"}, "not a range"),
        ({"seeds": "1,1"}, "has one seed twice"),
        ({"seeds": "-1"}, "is not understood"),
    ],
)
def test_what_a_race_cannot_read_is_named(arguments: dict[str, str], words: str) -> None:
    given = {"names": "muon,adamw"} | arguments
    with pytest.raises(LabError, match=words):
        racing.race_plan("grokking", given.pop("names"), **given)  # type: ignore[arg-type]
