"""A campaign records the command that started it; the page shows it, and it makes the same plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gomuon.lab import campaign_commands, cli
from gomuon.lab.experiments.plan import Plan
from tests.lab.test_cli import TINY
from tools.evidence.campaign_list import CAMPAIGNS
from tools.evidence.collect import without_places
from tools.evidence.command import main

ROOT = Path(__file__).parents[3]
# What decides the numbers of a campaign; titles and the paper's figures may be worded anew.
DECISIVE = (
    *("experiment", "task", "label", "seeds", "tuning_seed", "steps", "windows", "comparisons"),
    *("settings", "timing", "threads", "rule"),
)
OF_ARMS = ("name", "optimizer", "lr", "grid", "options", "settings", "group")


def test_the_command_is_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    race = ["race", "--optimizers", "adamw", "--seeds", "0", "--steps", "2", "--jobs", "1", *TINY]
    folder = tmp_path / "runs" / "race-grokking"
    words = [*race, "--out", str(folder), "--timing"]
    assert cli.main(words) == 0
    assert json.loads((folder / "plan.json").read_text())["argv"] == words

    assert main(["--collect", str(folder)]) == 0
    kept = json.loads(Path("results/race-grokking/plan.json").read_text())
    assert kept["argv"] == [*race, "--timing"], "without the folders of this machine"
    assert main([]) == 0
    page = Path("docs/reproduction.md").read_text()
    assert (
        "| `race-grokking` | `gomuon race --optimizers adamw --seeds 0 --steps 2 --jobs 1 "
        "--width 8 --layers 1 --heads 2 --hidden 8 --modulus 5 --threads 1 --timing` |"
    ) in page


def test_folders_of_one_machine_are_left_out_in_both_spellings() -> None:
    words = ["race", "--out", "/a/b", "--data-dir=/c/d", "--steps", "2", "--out"]
    assert without_places(words) == ["race", "--steps", "2"]


@pytest.mark.parametrize("name", [n for n in CAMPAIGNS if (ROOT / "results" / n).is_dir()])
def test_a_committed_command_makes_the_committed_plan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Plan] = []
    monkeypatch.setattr(campaign_commands, "carry_out", lambda plan, *_: planned.append(plan))
    monkeypatch.chdir(ROOT)
    kept = json.loads((ROOT / "results" / name / "plan.json").read_text())
    assert cli.main(kept["argv"]) == 0
    (plan,) = planned
    made = plan.declaration()
    assert {field: made[field] for field in DECISIVE} == {field: kept[field] for field in DECISIVE}
    arms = [[{field: arm[field] for field in OF_ARMS} for arm in of["arms"]] for of in (made, kept)]
    assert arms[0] == arms[1]


@pytest.mark.parametrize("name", ["shakespeare", "grokking", "tune-ptb"])
def test_a_race_takes_a_committed_selection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Plan] = []
    monkeypatch.setattr(campaign_commands, "carry_out", lambda plan, *_: planned.append(plan))
    path = ROOT / "results" / name / "selection.json"
    assert cli.main(["race", "--selection", str(path)]) == 0
    methods = json.loads(path.read_text())["methods"]
    (plan,) = planned
    assert {arm.optimizer: arm.lr for arm in plan.arms} == {
        method: entry["rate"] for method, entry in methods.items()
    }
