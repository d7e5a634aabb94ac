"""What the page says of clocks: by the rules that were declared, and nothing before the runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.experiments.clock_plans import ADAPTIVE, COHERENCE, ONE_THING, PAPERS, TARGETS
from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results.statistics import geometric_mean
from tests.tools.evidence.made_results import thin_campaign
from tools.evidence.results_folder import read_evidence
from tools.evidence.sections import clocks


def outcomes(
    plan: Plan, levels: Mapping[str, float | None], counts: Mapping[str, int] | None = None
) -> Any:
    """Each arm's losses are about 2 times its level; None: it diverges."""
    names = [arm.name for arm in plan.arms]

    def change(config: RunConfig) -> Mapping[str, Any]:
        level = levels.get(config.arm, 1.0)
        # To one side and to the other in turn, so that no mean is far from its level.
        shift = 1e-3 * (2 + names.index(config.arm)) * (-1) ** config.seed
        mean = 2.0 * (level or 1.0) * (1 + shift)
        counted = {"refreshes": None if counts is None else counts.get(config.arm, 100)}
        if config.task == "grokking":
            step = round(100 * mean)
            grokked = {"grok_step": step, "train_99_step": 60, "delay": step - 60}
            return {**grokked, "retention_failures": [], "final_test_accuracy": 1.0, **counted}
        windows = [window_name(window) for window in plan.windows]
        if level is None:
            lost = {"geometric_mean": None, "diverged_at": config.steps}
            return {"windows": dict.fromkeys(windows), **lost}
        means = dict.fromkeys(windows, mean)
        return {"windows": means, "geometric_mean": geometric_mean([*means.values()]), **counted}

    return change


def section_of(results: Path) -> str:
    return "\n".join(clocks.section(read_evidence(results)))


@pytest.mark.parametrize(
    ("level", "refreshes", "worth"),
    [(1.0, 40, True), (1.0, 60, False), (1.05, 40, False), (0.9, 50, True)],
)
def test_an_adaptive_clock_needs_few_refreshes_and_a_low_loss(
    level: float, refreshes: int, worth: bool, tmp_path: Path
) -> None:
    arm = f"adaptive-{TARGETS[0]:g}"
    for plan in ADAPTIVE:
        made = outcomes(plan, {arm: level}, {arm: refreshes})
        thin_campaign(tmp_path / plan.experiment, plan, made)
    evidence, said = read_evidence(tmp_path), section_of(tmp_path)
    for plan in ADAPTIVE:
        study = evidence[plan.experiment]
        assert clocks.share_of_refreshes(study, arm) == refreshes / 100
        found = clocks.difference(study, PAPERS, arm)
        assert found is not None
        own, papers = (statistics.fmean(clocks.scores(study, name)) for name in (arm, PAPERS))
        assert found.mean == pytest.approx(own / papers - 1)
        assert found.mean == pytest.approx(level - 1, abs=0.02)
    title = f"Adaptive({TARGETS[0]:g}) makes {refreshes} % of the refreshes of K = 4"
    sentences = [one for one in said.split("rule.") if title in one]
    assert len(sentences) == len(ADAPTIVE)
    assert [": worth it by" in one.split(title)[1] for one in sentences] == [worth] * 3


def test_a_diverged_arm_and_uncounted_refreshes_are_said(tmp_path: Path) -> None:
    plan = ADAPTIVE[0]
    arm = f"adaptive-{TARGETS[0]:g}"
    thin_campaign(tmp_path / plan.experiment, plan, outcomes(plan, {arm: None}))
    said = section_of(tmp_path)
    assert f"A run of Adaptive({TARGETS[0]:g}) or of K = 4 diverged." in said
    assert f"The refreshes of Adaptive({TARGETS[1]:g}) were not counted." in said
    assert "worth it by" not in said


@pytest.mark.parametrize("on_both", [True, False])
def test_a_cause_needs_both_texts(on_both: bool, tmp_path: Path) -> None:
    for place, plan in enumerate(COHERENCE):
        level = 0.98 if on_both or place == 0 else 1.0
        made = outcomes(plan, {"observed-1": level})
        thin_campaign(tmp_path / plan.experiment, plan, made)
    evidence, said = read_evidence(tmp_path), section_of(tmp_path)
    for pair, what in ONE_THING.items():
        found = clocks.cause(evidence, *pair)
        assert found is not None
        assert len(found) == len(COHERENCE)
        expected = on_both and "observed-1" in pair
        assert clocks.is_cause(found) == expected
        sentence = said.split(f"{what[0].upper()}{what[1:]}: ")[1].split(".\n")[0]
        assert ("by the rule this matters" in sentence.split("; ")[1]) == expected


def test_nothing_is_said_before_the_runs(tmp_path: Path) -> None:
    said = "\n".join(clocks.section({}))
    assert said.count("not run yet") == len(ADAPTIVE) + len(COHERENCE) * len(ONE_THING)
    assert "by the rule this" not in said
    thin_campaign(tmp_path / COHERENCE[0].experiment, COHERENCE[0])  # one of two texts
    assert "by the rule this" not in section_of(tmp_path)
