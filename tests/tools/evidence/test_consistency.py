"""A results folder that contradicts itself is refused, by file and by value."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from tests.tools.evidence.made_results import edit, small_plan, sweep, thin_campaign
from tools.evidence.results_folder import read_evidence, read_study
from tools.evidence.step_times import StepTimes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    thin_campaign(results / "ptb", small_plan())
    thin_campaign(results / "grokking", EXPERIMENTS["grokking"])
    return results


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "results"))


def test_what_fits_is_read(results: Path) -> None:
    (results / "bench").mkdir()
    evidence = read_evidence(results)
    assert list(evidence) == ["ptb", "grokking"]
    study = evidence["ptb"]
    assert study.shortcoming is None
    assert len(study.curves) == len(study.runs) == study.declared == 2
    result = json.loads((results / "ptb" / "runs" / "muon-s0" / "result.json").read_text())
    assert study.losses("muon", "201-300", [0]) == [result["windows"]["201-300"]]
    assert study.losses("muon", "geometric mean", [0]) == [result["geometric_mean"]]


def test_an_arm_is_called_as_the_catalogue_calls_it_today(tmp_path: Path) -> None:
    older = replace(EXPERIMENTS["ptb"].arms[0], title="an older title")
    plan = replace(EXPERIMENTS["ptb"], arms=(older, *EXPERIMENTS["ptb"].arms[1:]))
    study = read_study(thin_campaign(tmp_path / "ptb", plan), "ptb")
    assert study.arm(older.name).title == EXPERIMENTS["ptb"].arms[0].title
    assert study.plan["arms"][0]["title"] == "an older title"


Damage = Callable[[Path], None]
RUN = "ptb/runs/muon-s0"
GROK = "grokking/runs/p103-muon-0.16-s0"


def changed(file: str, **changes: object) -> Damage:
    return lambda results: edit(results / file, **changes)


def shifted_window(results: Path) -> None:
    path = results / RUN / "result.json"
    result = json.loads(path.read_text())
    windows = {name: mean + 0.001 for name, mean in result["windows"].items()}
    mean = math.prod(windows.values()) ** (1 / 3)
    path.write_text(json.dumps({**result, "windows": windows, "geometric_mean": mean}))


def other_hash(results: Path) -> None:
    path = results / RUN / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["hashes"]["stream"] = "0" * 64
    path.write_text(json.dumps(manifest))


def other_rate(results: Path) -> None:
    path = results / RUN / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["adamw_lr"] = 0.5
    path.write_text(json.dumps(manifest))
    edit(results / "ptb" / "plan.json", settings={"adamw_lr": 0.003})


def cut_curve(results: Path) -> None:
    path = results / RUN / "curve.json"
    curve = json.loads(path.read_text())
    path.write_text(json.dumps({**curve, "loss": curve["loss"][:-1]}))


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (changed(f"{RUN}/result.json", geometric_mean=1.0), RUN, "geometric_mean is 1.0, but its"),
        (shifted_window, RUN, "window 201-300 is "),
        (changed(f"{RUN}/result.json", steps=990), RUN, "its result has 990 of 1000 updates"),
        (changed(f"{RUN}/result.json", steps="x"), RUN, "steps is 'x', not a number"),
        (changed(f"{RUN}/result.json", windows=None), RUN, "'windows' is missing"),
        (changed(f"{RUN}/result.json", windows={"1-2": 1.0}), RUN, "windows is ['1-2'], but"),
        (changed(f"{RUN}/curve.json", updates=995), RUN, "steps is 1000, but curve.json has 995"),
        (changed(f"{RUN}/curve.json", block=20), RUN, "blocks of 20"),
        (changed(f"{RUN}/curve.json", loss="no"), RUN, "not a thinned curve"),
        (cut_curve, RUN, "99 blocks of 10 updates cannot be 1000 updates"),
        (other_hash, RUN, "their stream hashes differ"),
        (other_rate, RUN, "its adamw_lr is 0.5, but plan.json declares 0.003"),
        (changed(f"{GROK}/result.json", grok_step=30, delay=None), GROK, "delay is None, but"),
        (changed(f"{GROK}/result.json", retention_failures=[7]), GROK, "retention_failures is [7]"),
        (changed("ptb/plan.json", task="shakespeare"), "ptb", "its task is 'shakespeare'"),
    ],
)
def test_a_contradiction_is_named(results: Path, damage: Damage, file: str, words: str) -> None:
    damage(results)
    with pytest.raises(LabError) as error:
        read_evidence(results)
    assert words in str(error.value)
    assert file in str(error.value)


def test_a_grok_step_must_be_the_curves(results: Path) -> None:
    path = results / GROK / "result.json"
    result = json.loads(path.read_text())
    assert result["grok_step"] is not None
    later = result["grok_step"] + 10
    edit(path, grok_step=later, delay=later - result["train_99_step"])
    with pytest.raises(LabError, match=f"grok_step is {later}, but curve.json gives"):
        read_evidence(results)
    edit(path, **{**result, "train_99_step": 4000, "delay": result["grok_step"] - 4000})
    with pytest.raises(LabError, match=r"train_99_step is 4000, but curve.json reaches 99% at"):
        read_evidence(results)


def test_an_unfinished_or_foreign_run_is_refused(results: Path) -> None:
    shutil.copytree(results / RUN, results / "ptb" / "runs" / "stray")
    with pytest.raises(LabError, match=r"stray does not belong to plan.json"):
        read_evidence(results)
    shutil.rmtree(results / "ptb" / "runs" / "stray")
    (results / RUN / "result.json").unlink()
    with pytest.raises(LabError, match=r"only finished runs belong here"):
        read_evidence(results)


def test_an_older_folder_without_curves_is_read(results: Path) -> None:
    for path in results.rglob("curve.json"):
        path.unlink()
    assert read_evidence(results)["ptb"].curves == {}


def test_a_quick_or_partial_campaign_says_so(tmp_path: Path) -> None:
    thin_campaign(tmp_path / "ptb", small_plan(label="quick"))
    assert read_evidence(tmp_path)["ptb"].shortcoming == "only a quick run"
    thin_campaign(tmp_path / "more" / "ptb", small_plan(seeds=(0, 1)))
    shutil.rmtree(tmp_path / "more" / "ptb" / "runs" / "muon-s1")
    study = read_evidence(tmp_path / "more")["ptb"]
    assert study.shortcoming == "3 of 4 runs so far"
    assert study.seeds_of("muon", "go-muon") == [0]


def test_tuning_runs_are_held_to_the_plan(tmp_path: Path) -> None:
    folder = thin_campaign(tmp_path / "shakespeare", EXPERIMENTS["shakespeare"])
    assert read_study(folder, "shakespeare").declared == 7 + 9
    path = folder / "runs" / "muon-lr0.04-s17401" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["threads"] = 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(LabError, match=r"its threads is 2, but plan.json declares 1"):
        read_study(folder, "shakespeare")
    manifest["config"]["threads"] = 1
    manifest["hashes"]["parameters"] = "0"
    path.write_text(json.dumps(manifest))
    with pytest.raises(LabError, match=r"their parameters hashes differ"):
        read_study(folder, "shakespeare")


def test_a_selection_is_held_to_its_runs(tmp_path: Path) -> None:
    sweep(tmp_path, "ptb", steps=100)
    path = tmp_path / "tune-ptb" / "selection.json"
    selection = json.loads(path.read_text())
    entry = selection["methods"]["muon"]
    entry["candidates"][0]["statistic"] += 0.1
    path.write_text(json.dumps(selection))
    with pytest.raises(LabError, match=r"statistic of muon at 0.01 is"):
        read_evidence(tmp_path)
    entry["candidates"][0]["statistic"] -= 0.1
    entry["statistic"] += 0.1
    path.write_text(json.dumps(selection))
    with pytest.raises(LabError, match=r"statistic of muon is .* but its best is"):
        read_evidence(tmp_path)


def test_times_are_ratios_of_what_took_turns(tmp_path: Path) -> None:
    folder = thin_campaign(tmp_path / "ptb", small_plan(timing=("muon", "go-muon")))
    seconds = [[1.0, 2.0, 4.0], [2.0, 4.0, 2.0]]
    edit(folder / "timing.json", arms=["muon", "go-muon"], seconds=seconds)
    timing = StepTimes.of(read_study(folder, "ptb"))
    assert timing is not None
    ratio = timing.ratio("muon", "go-muon")
    assert ratio is not None
    assert ratio.mean == pytest.approx(2 ** (1 / 3))  # ratios 2, 2 and 1/2
    assert ratio.low < ratio.mean < ratio.high
    deviation = math.sqrt(((2 / 3) ** 2 * 2 + (4 / 3) ** 2) / 2)  # of log2: 1, 1 and -1
    assert ratio.spread == pytest.approx(2**deviation)
    assert timing.ratio("muon", "soap") is None
    assert timing.seconds_of("muon") == pytest.approx(7 / 3)

    edit(folder / "timing.json", seconds=[[1.0, 3.0], [4.0]])
    uneven = StepTimes.of(read_study(folder, "ptb"))
    assert uneven is not None
    other = uneven.ratio("muon", "go-muon")
    assert other is not None
    assert (other.mean, other.spread) == (2.0, None)
    edit(folder / "timing.json", seconds=[[1.0, -3.0], [4.0]])
    with pytest.raises(LabError, match=r"the seconds of muon are"):
        StepTimes.of(read_study(folder, "ptb"))
    edit(folder / "timing.json", seconds=[[1.0]])
    with pytest.raises(LabError, match=r"not a valid timing file"):
        StepTimes.of(read_study(folder, "ptb"))
