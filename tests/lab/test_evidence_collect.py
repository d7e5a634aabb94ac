"""A campaign is kept in small files that say what it said, and nothing of the machine."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.evidence.collecting import collect
from gomuon.lab.evidence.page import markdown
from gomuon.lab.evidence.thinning import BLOCK, Curve, read_curve, thin
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.results.runs import load_run
from gomuon.lab.results.statistics import grok_step
from tests.lab.helpers.commands import refused
from tests.lab.helpers.made_campaigns import MACHINE, VERSIONS, write_run
from tests.lab.helpers.tiny_runs import addition, characters
from tests.lab.made_evidence import COMMIT, edit, full_campaign, small_plan


@pytest.fixture
def ptb(tmp_path: Path) -> Path:
    return full_campaign(tmp_path / "runs" / "ptb", small_plan())


def test_a_campaign_is_kept_thin(
    ptb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ptb / "report.md").write_text("# A report\n\nNothing but 1/2 and 3/4 words/figures.\n")
    (ptb / "report.html").write_text("<html>")
    results = tmp_path / "results"
    assert cli.main(["evidence", "--collect", str(ptb), "--results", str(results)]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out
    kept = results / "ptb"
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    run_files = {"manifest.json", "result.json", "curve.json"}
    assert names == {
        "plan.json",
        "report.md",
        *(f"runs/{run}/{file}" for run in ("muon-s0", "go-muon-s0") for file in run_files),
    }
    assert all(path.stat().st_size < 4000 for path in kept.rglob("*.json"))
    for run in ("muon-s0", "go-muon-s0"):
        full = load_run(ptb / "runs" / run)
        curve = read_curve(kept / "runs" / run)
        assert curve is not None
        assert curve.updates == 1000
        losses = [line["loss"] for line in full.metrics]
        assert curve.loss[7] == round(math.fsum(losses[70:80]) / 10, 5)
        assert json.loads((kept / "runs" / run / "result.json").read_text()) == full.result
        assert json.loads((kept / "runs" / run / "manifest.json").read_text())["commit"] == COMMIT
    assert not [path for path in results.iterdir() if path.name != "ptb"], "nothing left behind"


def test_a_fresh_campaign_replaces_an_older_one(ptb: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    collect(ptb, results)
    (results / "ptb" / "old.txt").write_text("")
    shutil.rmtree(results / "ptb" / "runs" / "muon-s0")
    study = collect(ptb, results)
    assert len(study.runs) == 2
    assert not (results / "ptb" / "old.txt").exists()


def test_only_finished_runs_are_kept(tmp_path: Path) -> None:
    folder = full_campaign(tmp_path / "ptb", small_plan())
    shutil.rmtree(folder / "runs" / "go-muon-s0")
    plan = small_plan()
    write_run(folder / "runs" / "go-muon-s0", plan.config(plan.arms[1], 0, 0.08), made=40)
    study = collect(folder, tmp_path / "results")
    assert [run.folder.name for run in study.runs] == ["muon-s0"]
    assert study.shortcoming == "1 of 2 runs so far"
    shutil.rmtree(folder / "runs" / "muon-s0")
    with pytest.raises(LabError, match="no finished run yet"):
        collect(folder, tmp_path / "results")
    assert (tmp_path / "results" / "ptb" / "runs" / "muon-s0").is_dir(), "what was there stays"


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("plan.json", {"rule": "as in /home/someone/plan.txt"}, "/home/someone/plan.txt"),
        ("runs/muon-s0/manifest.json", {"machine": {"cores": 2, "file": "~/data/x"}}, "~/data/x"),
        ("runs/muon-s0/manifest.json", {"versions": {"torch": "C:\\torch"}}, "C:"),
    ],
)
def test_a_path_of_the_machine_is_refused(
    ptb: Path, tmp_path: Path, file: str, changes: dict[str, object], words: str
) -> None:
    edit(ptb / file, **changes)
    with pytest.raises(LabError, match="a path of this machine") as error:
        collect(ptb, tmp_path / "results")
    assert words in str(error.value)
    assert not (tmp_path / "results" / "ptb").exists()


def test_unknown_parts_of_a_manifest_are_not_copied(ptb: Path, tmp_path: Path) -> None:
    edit(ptb / "runs" / "muon-s0" / "manifest.json", folder="/home/someone/runs")
    collect(ptb, tmp_path / "results")
    kept = (tmp_path / "results" / "ptb" / "runs" / "muon-s0" / "manifest.json").read_text()
    assert "someone" not in kept


def test_runs_of_another_plan_are_refused(
    ptb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evidence", "--collect", str(ptb), "--results", str(tmp_path / "results")]
    shutil.copytree(ptb / "runs" / "muon-s0", ptb / "runs" / "other-s0")
    assert "other-s0 does not belong to plan.json" in refused(command, capsys)
    shutil.rmtree(ptb / "runs" / "other-s0")
    shutil.rmtree(ptb / "runs" / "go-muon-s0")
    shutil.copytree(ptb / "runs" / "muon-s0", ptb / "runs" / "go-muon-s0")
    assert "its arm is 'muon', but plan.json declares 'go-muon'" in refused(command, capsys)
    assert not (tmp_path / "results" / "ptb").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lazzy", "unknown campaign 'lazzy'; did you mean 'lazy'?"),
        ("mapback", "its experiment is 'ptb', but mapback is the place of 'mapback'"),
        ("race-ptb", "but race-ptb is the place of 'race'"),
    ],
)
def test_a_campaign_goes_to_its_own_place(
    ptb: Path, tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = str(tmp_path / "results")
    command = ["evidence", "--collect", str(ptb), "--results", results, "--name", name]
    assert words in refused(command, capsys)


def test_what_is_no_campaign_is_not_overwritten(ptb: Path, tmp_path: Path) -> None:
    place = tmp_path / "results" / "ptb"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(LabError, match="is there and no campaign"):
        collect(ptb, tmp_path / "results")
    assert (place / "notes.txt").read_text() == "mine"


def test_a_single_run_is_no_campaign(ptb: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="single run, not a campaign"):
        collect(ptb / "runs" / "muon-s0", tmp_path / "results", "ptb")


def test_a_grokking_curve_keeps_when_it_groks() -> None:
    config = addition(steps=95, evaluate_every=5)
    metrics = [
        {"step": s, "loss": 1 / s, "train_accuracy": s / 100, "test_accuracy": 0.9899999 + s / 1e8}
        if s % 5 == 0
        else {"step": s, "loss": 1 / s, "train_accuracy": s / 100}
        for s in range(1, 96)
    ]
    curve = thin(metrics, config)
    assert len(curve.loss) == 10
    assert curve.ends[-1] == 95
    assert curve.loss[-1] == round(math.fsum(1 / s for s in range(91, 96)) / 5, 5)
    assert curve.train_points[:2] == [(10, 0.1), (20, 0.2)]
    assert len(curve.train_points) == 9
    assert [step for step, _ in curve.test_points] == list(range(5, 96, 5))

    # The side of 99 % on which an accuracy of the paper's sizes lies survives the rounding.
    for pairs in (5305, 5725):
        below = math.ceil(0.99 * pairs) - 1
        accuracies = [below / pairs, *[(below + 1) / pairs] * 5]
        exact = list(enumerate(accuracies))
        rounded = [(step, round(value, 6)) for step, value in exact]
        assert grok_step(rounded) == grok_step(exact) == 1


def test_block_means_know_where_they_end() -> None:
    curve = Curve(updates=35, loss=(4.0, 3.0, 2.0, 1.0))
    assert curve.mean(11, 30) == 2.5
    assert curve.mean(1, 10) == 4.0
    assert curve.mean(11, 35) is None
    assert curve.mean(5, 20) is None
    assert thin([], characters()).loss == ()
    assert BLOCK == 10


def test_the_experiments_fit_their_places() -> None:
    assert set(EXPERIMENTS) == {"ptb", "shakespeare", "grokking", "mapback", "lazy"}


def test_where_a_run_was_continued_is_kept_and_shown(ptb: Path, tmp_path: Path) -> None:
    newer = {**VERSIONS, "torch": "2.99"}
    entry = {"step": 40, "commit": "f" * 40, "versions": newer, "machine": MACHINE}
    edit(ptb / "runs" / "muon-s0" / "manifest.json", resumed=[entry])
    study = collect(ptb, tmp_path / "results")
    found = {run.folder.name: [place.commit for place in run.resumed] for run in study.runs}
    assert found == {"muon-s0": ["f" * 40], "go-muon-s0": []}
    page = markdown({"ptb": study}, [])
    assert "`ffffffffffff`" in page
    assert "torch 2.99" in page


def test_a_kernels_release_is_not_kept(ptb: Path, tmp_path: Path) -> None:
    edit(ptb / "runs" / "muon-s0" / "manifest.json", machine={**MACHINE, "system": "Linux 6.1-x"})
    kept = collect(ptb, tmp_path / "results").arm("muon").runs[0]
    assert kept.machine["system"] == "Linux"
