"""The report of a sweep shows its candidates and what was picked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gomuon.lab.experiments import optimizers, tuning
from gomuon.lab.report import writing
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
