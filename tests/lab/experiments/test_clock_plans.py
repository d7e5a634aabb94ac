"""The plans about clocks: arms that differ in one thing, and maps that move between refreshes."""

from typing import Any

import pytest
import torch

from gomuon import Adaptive, GoMuon
from gomuon.lab.experiments import catalogue, optimizers
from gomuon.lab.experiments.clock_plans import (
    ADAPTIVE,
    COHERENCE,
    COHERENCE_ARMS,
    FIXED,
    HELD,
    ONE_THING,
    TARGETS,
)
from gomuon.lab.experiments.interpolated import InterpolatedGoMuon
from gomuon.lab.experiments.plan import Arm, Plan
from tests.models import train, transformer

NAMES = ("left_map", "right_map")


@pytest.mark.parametrize("plan", [*ADAPTIVE, *COHERENCE], ids=lambda plan: plan.experiment)
def test_every_arm_can_be_built_from_what_its_plan_declares(plan: Plan) -> None:
    assert catalogue.find(plan.experiment) is plan
    assert len(plan.seeds) == 5
    for arm in plan.arms:
        config = plan.config(arm, plan.seeds[0], 0.08)
        model = transformer(layers=1, dtype=torch.float32)
        built = optimizers.build(config.optimizer, model, 0.08, 3e-3, config.options)
        assert built.param_groups[0]["lr"] == 0.08


def clock_of(arm: Arm) -> Any:
    built = optimizers.build(
        arm.optimizer, transformer(layers=1, dtype=torch.float32), 0.08, 3e-3, arm.options
    )
    return built.param_groups[0]["refresh_every"]


def test_the_adaptive_plans_have_fixed_and_adaptive_clocks() -> None:
    for plan in ADAPTIVE:
        clocks = [clock_of(arm) for arm in plan.arms]
        assert clocks == [*FIXED, *(Adaptive(target) for target in TARGETS)]
        assert plan.settings["telemetry"], "refreshes are counted"


def test_arms_of_a_coherence_pair_differ_in_one_thing() -> None:
    """Two pairs of (HELD, every-1) differ in both, which the table says."""
    settings = {
        name: {"stagger": False, "statistics_every": None, **options, "optimizer": optimizer}
        for name, (_, optimizer, options) in COHERENCE_ARMS.items()
    }
    for one in settings.values():
        one["statistics_every"] = one["statistics_every"] or one["refresh_every"]
    for (first, second), what in ONE_THING.items():
        changed = [key for key in settings[first] if settings[first][key] != settings[second][key]]
        assert len(changed) == (2 if what.startswith("both") else 1), (first, second)


def maps(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state[model.get_parameter("trunk.blocks.0.mlp.down.weight")]
    return [state[name].clone() for name in NAMES]


def test_interpolated_maps_go_from_one_refresh_to_the_next_in_equal_steps() -> None:
    """Of weights that stand still, so that Go-MUON's own maps are the ends."""
    still: dict[str, Any] = {"lr": 0.0, "adamw": {"lr": 0.0}, "refresh_every": 4}
    models = [transformer(layers=1) for _ in range(2)]
    plain = GoMuon(models[0], **still)
    moving = InterpolatedGoMuon(models[1], **still)
    ends: list[list[torch.Tensor]] = []
    for step in range(12):
        train(models[0], plain, range(step, step + 1))
        train(models[1], moving, range(step, step + 1))
        if step % 4 == 0:
            ends.append(maps(models[0], plain))
        begin = ends[-2] if len(ends) > 1 else ends[-1]
        share = (step % 4 + 1) / 4
        for old, new, found in zip(begin, ends[-1], maps(models[1], moving), strict=True):
            torch.testing.assert_close(found, old + share * (new - old), rtol=1e-9, atol=1e-12)


def test_interpolated_maps_continue_from_a_checkpoint() -> None:
    models = [transformer(layers=1) for _ in range(2)]
    first = InterpolatedGoMuon(models[0], lr=0.05)
    train(models[0], first, range(6))
    models[1].load_state_dict(models[0].state_dict())
    second = InterpolatedGoMuon(models[1], lr=0.05)
    second.load_state_dict(first.state_dict())
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(6, 12))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_controls_are_found_but_not_listed() -> None:
    assert "go-muon-interpolated" not in optimizers.names()
    assert optimizers.title("go-muon-interpolated") == "Go-MUON with interpolated maps"
    assert COHERENCE[0].arms[0].name == HELD
