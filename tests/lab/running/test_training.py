"""A run folder survives whatever happens to its process, and says what is wrong with it."""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.lab import files, machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.results import runs
from gomuon.lab.results.runs import CHECKPOINT, MANIFEST, METRICS, RESULT, TIMING, load_run
from gomuon.lab.running.training import UpdateReport, train
from tests.lab.helpers.tiny_runs import (
    addition,
    characters,
    corpus_on_disk,
    forking,
    metrics_of,
    stop_after,
)


def test_a_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    assert train(addition(), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert [line["step"] for line in run.metrics if "test_accuracy" in line] == [10]
    assert len(run.timing) == 12
    assert run.finished
    assert run.result is not None
    assert run.result["steps"] == 12
    assert set(run.hashes) == {"parameters", "stream", "schedule", "corpus", "model"}
    assert all(len(value) == 64 for value in run.hashes.values())
    assert run.versions["torch"] == str(torch.__version__)
    assert run.config == addition()
    assert not list((tmp_path / "run").glob(".*.part"))


def test_the_loss_is_read_before_the_update(tmp_path: Path) -> None:
    train(addition(), tmp_path / "slow")
    train(addition(lr=5.0), tmp_path / "fast")
    slow, fast = load_run(tmp_path / "slow").metrics, load_run(tmp_path / "fast").metrics
    assert slow[0] == fast[0]
    assert slow[1] != fast[1]


def test_a_run_continued_by_other_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "source_commit", lambda: "first")
    train(addition(), tmp_path / "run", stop=stop_after(4))
    said: list[str] = []
    train(addition(), tmp_path / "run", stop=stop_after(1), say=said.append)
    assert (load_run(tmp_path / "run").resumed, said) == ((), [])

    monkeypatch.setattr(machine, "source_commit", lambda: "second")
    for _ in range(2):  # what is recorded already is not recorded again
        train(addition(), tmp_path / "run", stop=stop_after(1), say=said.append)
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "made"})
    train(addition(), tmp_path / "run", say=said.append)
    run = load_run(tmp_path / "run")
    assert run.commit == "first"
    assert [(entry.step, entry.commit) for entry in run.resumed] == [(5, "second"), (7, "second")]
    assert run.resumed[0].versions == run.versions
    assert run.resumed[1].versions == {"torch": "made"}
    assert run.resumed[1].machine == run.machine
    assert said == [
        "run: commit changed after update 5; manifest.json has the old and the new values",
        "run: versions changed after update 7; manifest.json has the old and the new values",
    ]
    train(addition(), tmp_path / "whole")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_a_release_behind_the_system_is_no_other_machine(tmp_path: Path) -> None:
    train(addition(), tmp_path, stop=stop_after(4))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["machine"]["system"] += " 6.1.0-made"
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    train(addition(), tmp_path)
    assert load_run(tmp_path).resumed == ()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "go-muon"])
def test_stopped_and_continued_is_the_same_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    config = addition(optimizer=optimizer, steps=14)
    train(config, tmp_path / "whole")
    for count in (1, 2, 5, 4):
        train(config, tmp_path / "pieces", stop=stop_after(count))
    assert not runs.is_finished(tmp_path / "pieces")
    assert train(config, tmp_path / "pieces")
    assert metrics_of(tmp_path / "pieces") == metrics_of(tmp_path / "whole")
    whole, pieces = (load_run(tmp_path / name).result for name in ("whole", "pieces"))
    assert whole == pieces


def test_a_torn_last_line_is_healed(tmp_path: Path) -> None:
    train(addition(), tmp_path / "whole")
    folder = tmp_path / "torn"
    train(addition(), folder, stop=stop_after(5))
    with (folder / METRICS).open("ab") as file:
        file.write(b'{"step": 6, "lo')
    with (folder / TIMING).open("ab") as file:
        file.write(b"{")
    assert len(load_run(folder).metrics) == 5
    train(addition(), folder)
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")
    assert len(load_run(folder).timing) == 12


def test_a_checkpoint_counts_only_lines_that_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    real = files.Journal.sync

    def sync(journal: files.Journal) -> None:
        real(journal)
        synced[journal.path.name] = journal.length

    monkeypatch.setattr(files.Journal, "sync", sync)
    train(addition(), tmp_path, stop=stop_after(5))
    recorded = torch.load(tmp_path / CHECKPOINT, weights_only=True)["lengths"]
    assert synced == recorded
    assert set(recorded) == {METRICS, TIMING}


@pytest.mark.parametrize("name", [METRICS, TIMING])
def test_a_lost_journal_is_refused_and_not_made_up(name: str, tmp_path: Path) -> None:
    train(addition(), tmp_path, stop=stop_after(5))
    (tmp_path / name).unlink()
    with pytest.raises(LabError, match=f"{name} is shorter than its checkpoint says; delete"):
        train(addition(), tmp_path)
    assert not (tmp_path / name).exists()


def test_a_character_run_reports_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    train(characters(), tmp_path / "run", data_dir=data)
    run = load_run(tmp_path / "run")
    assert run.result is not None
    losses = [line["loss"] for line in run.metrics]
    assert list(run.metrics[0]) == ["step", "loss"]
    assert run.result["windows"] == {"3-3": losses[2], "6-6": losses[5], "10-10": losses[9]}
    product = losses[2] * losses[5] * losses[9]
    assert run.result["geometric_mean"] == pytest.approx(product ** (1 / 3))


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    train(addition(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != ".lock"}
    reports: list[UpdateReport] = []
    assert train(addition(), tmp_path, report=reports.append)
    assert reports == []
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_progress_is_reported_for_every_update(tmp_path: Path) -> None:
    reports: list[UpdateReport] = []
    train(addition(), tmp_path, report=reports.append)
    assert [progress.step for progress in reports] == list(range(1, 13))
    assert reports[3].metrics == load_run(tmp_path).metrics[3]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"lr": 0.02}, "lr"), ({"steps": 13}, "steps"), ({"threads": 2}, "thread")],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_configuration_is_refused_by_field(
    change: dict[str, Any], field: str, finished: bool, tmp_path: Path
) -> None:
    train(addition(), tmp_path, stop=stop_after(99 if finished else 4))
    with pytest.raises(LabError, match=f"started with {field}"):
        train(addition(**change), tmp_path)


def test_a_changed_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    train(characters(), tmp_path / "run", data_dir=data, stop=stop_after(3))
    corpus_on_disk(tmp_path / "data", monkeypatch, "another text entirely, long enough\n" * 9)
    with pytest.raises(LabError, match="corpus hash has changed"):
        train(characters(), tmp_path / "run", data_dir=data)


def test_a_damaged_checkpoint_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    train(addition(), tmp_path, stop=stop_after(5))
    before = metrics_of(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"not a checkpoint")
    with pytest.raises(LabError, match=r"checkpoint\.pt cannot be used"):
        train(addition(), tmp_path)
    assert metrics_of(tmp_path) == before


class Exploit:
    """What an unrestricted unpickler would run."""

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path("exploited"),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(addition(), tmp_path / "run", stop=stop_after(5))
    torch.save({"step": Exploit()}, tmp_path / "run" / CHECKPOINT)
    with pytest.raises(LabError, match="cannot be used"):
        train(addition(), tmp_path / "run")
    (tmp_path / "run" / CHECKPOINT).write_bytes(pickle.dumps(Exploit(), protocol=2))
    with pytest.raises(LabError, match="cannot be used"):
        train(addition(), tmp_path / "run")
    assert not (tmp_path / "exploited").exists()


def _train_on_a_full_disk(folder: Path, limit: int, answer: Any) -> None:
    # The kernel refuses to let any file grow past the limit, as a full disk would.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        train(addition(), folder)
        answer.send("finished")
    except LabError as error:
        answer.send(str(error))


@pytest.mark.parametrize("limit", [10, 300, 2_000, 9_000])
def test_a_full_disk_loses_nothing(limit: int, tmp_path: Path) -> None:
    train(addition(), tmp_path / "whole")
    folder = tmp_path / "full"
    train(addition(), folder, stop=stop_after(3))
    kept = (folder / CHECKPOINT).read_bytes()
    context = forking()
    here, there = context.Pipe()
    process = context.Process(target=_train_on_a_full_disk, args=(folder, limit, there))
    process.start()
    assert here.poll(60)
    said = here.recv()
    process.join()
    assert process.exitcode == 0
    assert "cannot write" in said
    assert "repeat the same command" in said
    assert "\n" not in said
    assert (folder / CHECKPOINT).read_bytes() == kept
    assert not list(folder.glob(".*.part"))
    train(addition(), folder)
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")


def test_leftovers_of_a_kill_are_swept(tmp_path: Path) -> None:
    train(addition(), tmp_path, stop=stop_after(3))
    (tmp_path / f".{CHECKPOINT}.999.part").write_bytes(b"half")
    train(addition(), tmp_path)
    assert not list(tmp_path.glob(".*.part"))


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    second = files.locked(tmp_path, patience=0.1)
    with files.locked(tmp_path), pytest.raises(LabError, match="is working in"), second:
        pytest.fail("the lock was given twice")
    with files.locked(tmp_path, patience=0.1):
        pass  # given back


@pytest.mark.parametrize("optimizer", ["adamw", "go-muon"])
def test_a_diverged_run_ends_with_a_result(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    config = characters(optimizer=optimizer, lr=1e30, adamw_lr=1e30)
    assert train(config, tmp_path / "run", data_dir=data)
    run = load_run(tmp_path / "run")
    assert run.result is not None
    assert run.result["diverged_at"] == run.result["steps"] + 1 <= 10
    assert run.result["geometric_mean"] is None
    json.loads((tmp_path / "run" / RESULT).read_text(), parse_constant=pytest.fail)


class Counting:
    """Stands in for the optimizer's own counts: one opposed source per step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        optimizer.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.steps += 1

    def now(self) -> dict[str, int]:
        return {"negative_source": self.steps, "negative_gradient": 0, "refreshes": 2 * self.steps}


def test_counts_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "watched", Counting)
    config = addition(telemetry=True)
    train(config, tmp_path, stop=stop_after(5))
    train(config, tmp_path, stop=stop_after(2))
    train(config, tmp_path)
    run = load_run(tmp_path)
    assert [line["negative_source"] for line in run.metrics] == list(range(1, 13))
    assert run.result is not None
    assert run.result["negative_source"] == 12
    assert run.result["negative_gradient"] == 0
    assert run.result["refreshes"] == 24


@pytest.mark.parametrize(
    ("every", "expected"),
    [(4, 3 * 7), ({"efficiency": 1e-9, "least": 1, "most": 64}, 5 * 7)],
    ids=["fixed", "adaptive"],
)
def test_a_run_records_how_many_maps_were_renewed(
    every: Any, expected: int, tmp_path: Path
) -> None:
    """Twelve updates of seven layers: at 0, 4 and 8, or at 0, 1, 2, 4 and 8."""
    config = addition(optimizer="go-muon", telemetry=True, options={"refresh_every": every})
    train(config, tmp_path, stop=stop_after(5))
    train(config, tmp_path)
    result = load_run(tmp_path).result
    assert result is not None
    assert result["refreshes"] == expected
