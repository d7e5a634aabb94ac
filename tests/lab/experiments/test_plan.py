"""A shortened plan is labelled, and its settings reach every arm."""

from __future__ import annotations

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import catalogue
from gomuon.lab.experiments.plan import Arm, Quick, adapt
from tests.lab.helpers.tiny_runs import addition_plan

ARMS = (Arm("slow", "Slow", "adamw", 0.001), Arm("fast", "Fast", "adamw", 0.05))


def test_quick_and_short_plans_are_labelled() -> None:
    plan = catalogue.PTB
    assert adapt(plan).label == "full"
    assert adapt(plan, seeds=(7,)).label == "full"
    assert adapt(plan, quick=True).label == "quick"
    short = adapt(plan, steps=500)
    assert short.label == "quick"
    assert short.windows == ((101, 150), (251, 300), (451, 500))
    assert all(config.label == "quick" for config in short.main_configs({}))
    with pytest.raises(LabError, match="--steps must be at least 1, not -5"):
        adapt(plan, steps=-5)


def test_quick_settings_reach_every_arm() -> None:
    plan = addition_plan(ARMS, quick=Quick(steps=4, seeds=1, settings={"width": 4}), seeds=(0, 1))
    quick = adapt(plan, quick=True)
    assert (quick.steps, quick.seeds) == (4, (0,))
    assert quick.config(quick.arms[0], 0, 0.1).width == 4
