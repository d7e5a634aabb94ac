"""Symbolic links in a campaign folder are refused, and their targets stay unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gomuon.lab import files
from gomuon.lab.bench import benchmark
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.plan import Arm
from gomuon.lab.report.writing import write_report
from gomuon.lab.results.runs import CHECKPOINT, MANIFEST, METRICS, RESULT, TIMING
from gomuon.lab.running.execution import PLAN, RUNS, SELECTION, run_campaign
from gomuon.lab.running.training import train
from tests.lab.helpers.made_campaigns import race, write_campaign
from tests.lab.helpers.tiny_runs import Silent, addition, addition_plan, stop_after

PLAN_OF_ONE = addition_plan((Arm("adamw", "AdamW", "adamw", 0.01),))
WORDS = "is a symbolic link, and gomuon does not write through links"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text('{"mine": 1}\n')
    return path


@pytest.mark.parametrize("name", [".lock", METRICS, TIMING, MANIFEST, CHECKPOINT, RESULT])
def test_a_run_writes_through_no_link(name: str, tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "run"
    train(addition(), folder, stop=stop_after(4))
    (folder / name).unlink(missing_ok=True)
    # A link to a result would mean that the run is finished; a dangling one does not.
    target = victim if name != RESULT else tmp_path / "absent"
    (folder / name).symlink_to(target)
    with pytest.raises(LabError, match=WORDS) as caught:
        train(addition(), folder)
    assert str(folder / name) in str(caught.value)
    assert victim.read_text() == '{"mine": 1}\n'
    assert not (tmp_path / "absent").exists()
    (folder / name).unlink()
    if name not in (METRICS, TIMING):  # those are lost with the file the link replaced
        assert train(addition(), folder)


@pytest.mark.parametrize("name", [".lock", PLAN, SELECTION, "timing.json", "report.md"])
def test_a_campaign_writes_through_no_link(name: str, tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "campaign"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(LabError, match=WORDS):
        run_campaign(PLAN_OF_ONE, folder, observer=Silent())
    assert victim.read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize("inner", [RUNS, f"{RUNS}/adamw-s0"])
def test_a_campaign_enters_no_linked_folder(inner: str, tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "campaign"
    elsewhere.mkdir()
    (elsewhere / METRICS).write_text("mine\n")
    (folder / inner).parent.mkdir(parents=True)
    (folder / inner).symlink_to(elsewhere, target_is_directory=True)
    files.write_json(folder / PLAN, PLAN_OF_ONE.declaration())
    with pytest.raises(LabError, match=WORDS):
        run_campaign(PLAN_OF_ONE, folder, observer=Silent())
    assert [path.name for path in elsewhere.iterdir()] == [METRICS]
    assert (elsewhere / METRICS).read_text() == "mine\n"


def test_the_campaign_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "name").symlink_to(tmp_path / "real", target_is_directory=True)
    run_campaign(PLAN_OF_ONE, tmp_path / "name", observer=Silent())
    assert (tmp_path / "real" / RUNS / "adamw-s0" / RESULT).is_file()


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_report_is_written_through_no_link(name: str, tmp_path: Path, victim: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    (folder / name).symlink_to(victim)
    with pytest.raises(LabError, match=WORDS):
        write_report(folder)
    assert victim.read_text() == '{"mine": 1}\n'


def test_what_a_link_put_in_a_temporary_files_place_leads_to_stays(
    tmp_path: Path, victim: Path
) -> None:
    (tmp_path / f".plan.json.{os.getpid()}.part").symlink_to(victim)
    files.write_json(tmp_path / "plan.json", {"a": 1})
    assert files.read_json(tmp_path / "plan.json") == {"a": 1}
    assert not (tmp_path / "plan.json").is_symlink()
    assert victim.read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize("name", [".lock", benchmark.FILE])
def test_a_benchmark_writes_through_no_link(name: str, tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(LabError, match=WORDS):
        benchmark.run_benchmark(
            benchmark.BenchmarkSettings("mlp", "muon", 1, "quick", False), folder, "", Nobody()
        )
    assert victim.read_text() == '{"mine": 1}\n'


class Nobody:
    """A benchmark that must not begin."""

    def begin(self, title: str, turns: int) -> None:
        pytest.fail("it measured something")

    def tick(self, arm: str, step: int) -> None: ...

    def skip(self, title: str) -> None: ...


@pytest.mark.parametrize("name", [".lock", METRICS, CHECKPOINT, PLAN])
@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "campaign"
    run = folder / RUNS / "adamw-s0"
    config = PLAN_OF_ONE.config(PLAN_OF_ONE.arms[0], 0, 0.01)
    train(config, run, stop=stop_after(4))
    files.write_json(folder / PLAN, PLAN_OF_ONE.declaration())
    place = folder if name == PLAN else run
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    with pytest.raises(LabError, match=name):
        run_campaign(PLAN_OF_ONE, folder, observer=Silent())
