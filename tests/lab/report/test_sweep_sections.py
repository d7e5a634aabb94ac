"""The report of a sweep shows its candidates and what was picked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gomuon.lab.experiments import optimizers, tuning
from gomuon.lab.report import writing
from gomuon.lab.report.sweep_plot import SweepLine, SweepPoint, ceiling, sweep
from gomuon.lab.results.campaigns import read_campaign
from gomuon.lab.results.candidates import picks_of_campaign
from gomuon.lab.results.statistics import loss_score, run_result
from tests.lab.helpers.made_campaigns import write_campaign


@pytest.mark.parametrize("task", ["ptb", "grokking"])
def test_the_report_of_a_sweep_is_about_what_it_picked(task: str, tmp_path: Path) -> None:
    plan = tuning.tune_plan(task, "go-muon,muon", grid=3, momenta=".8,.95", steps=400)
    folder = write_campaign(tmp_path / "made", plan)
    writing.write_report(folder)
    text = (folder / "report.md").read_text()
    top = text[: text.index("## The sweep")]
    assert top.count("| 1. |") == top.count("| 2. |") == 1
    assert "| 3. |" not in top
    assert "picked on the same seed 0" in top
    assert text.count("| picked") == 2
    sweep = text[text.index("All candidates") : text.index("## ", text.index("All candidates"))]
    assert sweep.count("\n| 0.") == len(plan.arms) == 12
    assert optimizers.title("go-muon") in top


def test_an_unfinished_sweep_says_so(tmp_path: Path) -> None:
    plan = tuning.tune_plan("ptb", "go-muon,muon", grid=3, steps=40)
    folder = write_campaign(tmp_path / "made", plan)
    for path in folder.glob("runs/muon-*"):
        (path / "result.json").unlink()
    writing.write_report(folder)
    text = (folder / "report.md").read_text()
    assert "Picked so far" in text
    assert "Muon: nothing picked" in text
    for path in folder.glob("runs/go-muon-*"):
        (path / "result.json").unlink()
    writing.write_report(folder)
    assert "No run has finished yet" in (folder / "report.md").read_text()


def test_the_picture_stands_alone_and_seeds_are_told(tmp_path: Path) -> None:
    plan = tuning.tune_plan("shakespeare", "go-muon,muon", grid=3, seeds="0-2", steps=60)
    folder = write_campaign(tmp_path / "made", plan)
    writing.write_report(folder)
    for name in ("rates.svg", "rates-dark.svg"):
        assert (folder / name).read_text().lstrip().startswith("<?xml")
    text = (folder / "report.md").read_text()
    assert "Bands: from the lowest seed to the highest" in text
    campaign = read_campaign(folder)
    for pick in picks_of_campaign(campaign):
        assert pick.best is not None
        scores = [
            loss_score(run_result("shakespeare", 60, run.metrics))
            for run in campaign.arm(pick.best.arm).runs.values()
        ]
        assert list(pick.best.by_seed) == scores
        assert len(scores) == 3
        cells = next(
            [cell.strip(" *") for cell in line.strip("|").split("|")]
            for line in text[text.index("How much the rate") :].splitlines()
            if line.startswith(f"| {optimizers.title(pick.method)} |")
        )
        known = [score for score in scores if score is not None]
        assert cells[1:4] == [
            f"{pick.best.rate:g}",
            f"{pick.best.score:.5f}",
            f"{min(known):.5f} to {max(known):.5f}",
        ]


def test_one_rate_that_is_far_too_high_does_not_flatten_the_others() -> None:
    fine = (SweepPoint(0.1, 1.2), SweepPoint(0.2, 1.1), SweepPoint(0.4, 1.15))
    other = (SweepPoint(0.1, 1.3), SweepPoint(0.2, 1.25), SweepPoint(0.4, 9.0))
    lines = [SweepLine("a", 0, 0, fine, 0.2), SweepLine("b", 1, 0, other, 0.2)]
    # Two gaps of .15 between the two best ones above the worse of these.
    assert ceiling(lines) == pytest.approx(1.25 + 2 * 0.15)
    assert math.isinf(ceiling(lines[:1])), "nothing is cut off without need"
    assert "<svg" in sweep("c", "a", lines, "loss").narrow
