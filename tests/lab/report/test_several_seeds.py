"""Reports on several seeds: families of comparisons, and time to a target with censored runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from scipy import stats

from gomuon.lab.experiments.racing import race_plan
from gomuon.lab.results.campaigns import read_campaign
from gomuon.lab.results.language_outcomes import analyse
from tests.lab.helpers.made_campaigns import GROKS, write_campaign, write_lines
from tests.lab.helpers.reports import reported

ARMS = ("go-muon", "muon", "adamw")
HORIZON = 400


def cells_of(markdown: str, after: str, first: str) -> list[str]:
    """The cells of the first table row after a text whose first cell is `first`."""
    lines = markdown[markdown.index(after) :].splitlines()
    row = next(line for line in lines if line.replace("**", "").startswith(f"| {first} |"))
    return [cell.strip(" *") for cell in row.strip("|").split("|")]


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


@pytest.fixture
def grokked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, list[float]]]:
    """A race in which Go-MUON always groks, Muon on three of five seeds and AdamW never."""
    monkeypatch.setitem(GROKS, "muon", 240)
    folder = write_campaign(tmp_path / "c", race_plan("grokking", ",".join(ARMS), steps=HORIZON))
    for seed in (1, 3):
        path = folder / "runs" / f"muon-s{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [_held_back(line) for line in lines])
    times: dict[str, list[float]] = {}
    for arm in read_campaign(folder).arms:
        times[arm.name] = [_grok(run.metrics) for _, run in sorted(arm.runs.items())]
    return reported(folder)[0], times


def _held_back(line: dict[str, float]) -> dict[str, float]:
    held = {"test_accuracy": 0.5} if "test_accuracy" in line else {}
    return {**line, **held}


def _grok(lines: list[dict[str, float]]) -> float:
    """The first of five evaluations in a row at 99 %, or the horizon."""
    points = [(line["step"], line["test_accuracy"]) for line in lines if "test_accuracy" in line]
    for i in range(len(points) - 4):
        if all(accuracy >= 0.99 for _, accuracy in points[i : i + 5]):
            return points[i][0]
    return HORIZON


def test_runs_that_never_grok_are_censored(grokked: tuple[str, dict[str, list[float]]]) -> None:
    markdown, times = grokked
    assert [sum(t < HORIZON for t in times[arm]) for arm in ARMS] == [5, 3, 0]
    muon = times["muon"]
    cells = cells_of(markdown, "is censored at 400", "Muon 0.16")
    low, high = stats.t.interval(0.95, 4, statistics.fmean(muon), stats.sem(muon))
    assert cells[1:] == [
        "3 of 5",
        f"{sorted(muon)[2]:.0f}",
        f"{statistics.fmean(muon):.0f}",
        f"{max(0, low):.0f} to {min(HORIZON, high):.0f}",
    ]
    adamw = cells_of(markdown, "is censored at 400", "AdamW 0.01")
    assert adamw[1:] == ["0 of 5", "over 400", "400", "–"]


def test_pairs_of_times_use_every_seed(grokked: tuple[str, dict[str, list[float]]]) -> None:
    markdown, times = grokked
    tests = {arm: stats.ttest_rel(times["go-muon"], times[arm]) for arm in ("muon", "adamw")}
    cells = cells_of(markdown, "Go-MUON 0.08 against", "Muon 0.16")
    differences = [a - b for a, b in zip(times["go-muon"], times["muon"], strict=True)]
    alone, both = (tests["muon"].confidence_interval(c) for c in (0.95, 0.975))
    adjusted = max(tests["muon"].pvalue, 2 * min(t.pvalue for t in tests.values()))
    assert tests["muon"].pvalue > tests["adamw"].pvalue
    assert cells[1] == signed(statistics.fmean(differences), 0)
    assert cells[2] == f"{signed(alone.low, 0)} to {signed(alone.high, 0)}"
    assert cells[3] == f"{signed(both.low, 0)} to {signed(both.high, 0)}"
    assert float(cells[4]) == pytest.approx(adjusted, rel=0.1)
    assert cells[5:] == ["5 of 5", ".062"]
    evidence = markdown.split("\n\n")[2]
    assert "first on 5 of 5 seeds" in evidence
    assert "one of 3 pairs of arms" in evidence


def test_a_race_of_losses_is_judged_as_a_family(tmp_path: Path) -> None:
    plan = race_plan("experts", "go-muon,muon,soap,kfac,adamw", steps=60, target=1.45)
    folder = write_campaign(tmp_path / "c", plan)
    markdown, _ = reported(folder)
    outcomes = analyse(read_campaign(folder)).outcomes
    losses = {
        name: [by_seed[seed]["validation_loss"] for seed in range(5)]
        for name, by_seed in outcomes.items()
    }
    scale = 100 / statistics.fmean(losses["muon"])
    test = stats.ttest_rel(losses["go-muon"], losses["muon"])
    cells = cells_of(markdown, "All pairs by the validation loss", "Muon 0.02")
    for place, level in ((2, 0.95), (3, 1 - 0.05 / 4)):
        low, high = test.confidence_interval(level)
        assert cells[place] == f"{signed(scale * low, 2)} to {signed(scale * high, 2)} %"
    assert float(cells[4]) == pytest.approx(test.pvalue, rel=0.1)
    assert "one of 10 pairs of arms" in markdown.split("\n\n")[3]
    assert "validation loss than" in markdown.split("\n\n")[2]
    # Each pair's own table is there too, folded away on the page.
    assert markdown.count("on the same seed; negative means lower loss") == 4
    reached = sum(loss <= 1.45 for loss in losses["muon"])
    cells = cells_of(markdown, "Updates to a validation loss of 1.45", "Muon 0.02")
    assert cells[1] == f"{reached} of 5"


def test_a_training_loss_counts_as_reached_only_in_the_mean(tmp_path: Path) -> None:
    plan = race_plan("ptb", "go-muon,muon", steps=400, seeds="0-1", target=1.3)
    campaign = read_campaign(write_campaign(tmp_path / "c", plan))
    times = analyse(campaign).times(campaign.arm("muon"), 1.3)
    for seed, run in campaign.arm("muon").runs.items():
        losses = [line["loss"] for line in run.metrics]
        means = [statistics.fmean(losses[i - 10 : i]) for i in range(10, 401)]
        first = next(i for i, mean in enumerate(means, start=10) if mean <= 1.3)
        assert times[seed].reached
        assert times[seed].updates == first
        assert next(i for i, loss in enumerate(losses, start=1) if loss <= 1.3) < first
    never = analyse(campaign).times(campaign.arm("muon"), 0.1)
    assert [(time.updates, time.reached) for time in never.values()] == [(400, False)] * 2


def test_a_seed_alone_has_no_such_section(tmp_path: Path) -> None:
    plan = race_plan("grokking", "go-muon,muon", seeds="0", steps=200)
    markdown, _ = reported(write_campaign(tmp_path / "c", plan))
    assert "Time to 99" not in markdown
