"""A damaged or forged checkpoint is named, and nothing of the run is lost."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.lab.errors import LabError
from gomuon.lab.results.runs import CHECKPOINT, METRICS, TIMING
from gomuon.lab.running import training
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import addition, metrics_of, stop_after

State = dict[str, Any]


def begun(folder: Path, optimizer: str = "adamw") -> Path:
    train(addition(optimizer=optimizer), folder, stop=stop_after(5))
    return folder / CHECKPOINT


def refused(folder: Path, optimizer: str = "adamw") -> str:
    """What is said of a run that cannot be continued; its files stay."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(LabError) as caught:
        train(addition(optimizer=optimizer), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert str(folder) in str(caught.value)
    assert "delete this run's folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [None, 3, [], "x", {}, {"step": 1}, {"model": []}, torch.zeros(3), [{}], {"step": None}],
)
def test_a_checkpoint_of_something_else(content: Any, tmp_path: Path) -> None:
    torch.save(content, begun(tmp_path))
    assert f"{CHECKPOINT} cannot be used" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "flipped"])
def test_cut_and_flipped_checkpoints(kind: str, tmp_path: Path) -> None:
    content = begun(tmp_path / "run").read_bytes()
    train(addition(), tmp_path / "whole")
    generator = random.Random(0)
    for attempt in range(20):
        damaged = bytearray(content)
        if kind == "cut":
            del damaged[generator.randrange(len(damaged)) :]
        else:
            for _ in range(30):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        folder = tmp_path / str(attempt)
        shutil.copytree(tmp_path / "run", folder)
        (folder / CHECKPOINT).write_bytes(damaged)
        with contextlib.suppress(LabError):
            # What flips in padding does no harm; nothing else may come through.
            train(addition(), folder)
            assert metrics_of(folder) == metrics_of(tmp_path / "whole")


def lengths(state: State, **changes: Any) -> None:
    state["lengths"] |= changes


FORGERIES: dict[str, Callable[[State], Any]] = {
    "its step is 99": lambda s: s.update(step=99),
    "its step is -1": lambda s: s.update(step=-1),
    "its step is True": lambda s: s.update(step=True),
    "its step is 5.0": lambda s: s.update(step=5.0),
    "its step is '5'": lambda s: s.update(step="5"),
    "its format is 7": lambda s: s.update(format=7),
    "its lengths are {}": lambda s: s.update(lengths={}),
    "its lengths are [1, 2]": lambda s: s.update(lengths=[1, 2]),
    "its lengths are {'metrics.jsonl': -1": lambda s: lengths(s, **{METRICS: -1}),
    "its lengths are {'metrics.jsonl': 1.5": lambda s: lengths(s, **{METRICS: 1.5}),
    "its counts are {'negative_source': 'x'": lambda s: s.update(
        counts={"negative_source": "x", "negative_gradient": 0}
    ),
    "KeyError: 'counts'": lambda s: s.pop("counts"),
    "shorter than its checkpoint says": lambda s: lengths(s, **{METRICS: 10**9}),
    "the first 0 bytes of metrics.jsonl are not its updates": lambda s: lengths(s, **{METRICS: 0}),
    "the first 0 bytes of timing.jsonl are not its updates": lambda s: lengths(s, **{TIMING: 0}),
    "a parameter is at step 5, not 4": lambda s: s.update(step=4),
    "not those of the run": lambda s: s["optimizer"]["param_groups"][0].update(weight_decay=5.0),
    "exp_avg of a parameter is": lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(7)),
    "its optimizer has []": lambda s: s["optimizer"].update(state={}),
}


@pytest.mark.parametrize("words", FORGERIES)
def test_forged_values_are_not_taken(words: str, tmp_path: Path) -> None:
    path = begun(tmp_path)
    state = torch.load(path, weights_only=True)
    FORGERIES[words](state)
    torch.save(state, path)
    assert words in refused(tmp_path)


def test_a_step_that_is_not_the_optimizers_is_not_taken(tmp_path: Path) -> None:
    path = begun(tmp_path, "muon")
    state = torch.load(path, weights_only=True)
    for group in state["optimizer"]["param_groups"]:
        group["step"] = 3
    torch.save(state, path)
    assert "its optimizer is at step 3, the run at 5" in refused(tmp_path, "muon")


def test_a_half_line_is_not_counted_as_an_update(tmp_path: Path) -> None:
    path = begun(tmp_path)
    state = torch.load(path, weights_only=True)
    state["lengths"][METRICS] -= 3
    torch.save(state, path)
    assert f"{METRICS}, line 5: truncated or damaged" in refused(tmp_path)


def test_lines_of_other_updates_are_not_continued(tmp_path: Path) -> None:
    begun(tmp_path)
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(b"".join(reversed(lines)))
    assert f"bytes of {METRICS} are not its updates" in refused(tmp_path)


def test_a_state_that_fails_in_the_next_update_is_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    updates = copy.copy(training.Session.update)

    def update(session: training.Session, step: int) -> Any:
        if step == 6:
            raise IndexError("index 3 is out of bounds")
        return updates(session, step)

    monkeypatch.setattr(training.Session, "update", update)
    assert "cannot be used (IndexError" in refused(tmp_path)


def test_a_line_without_its_numbers_ends_in_words(tmp_path: Path) -> None:
    path = begun(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    del lines[2]["train_accuracy"]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / METRICS).write_bytes(content)
    state = torch.load(path, weights_only=True)
    state["lengths"][METRICS] = len(content)
    torch.save(state, path)
    with pytest.raises(LabError, match=rf"{METRICS}: a line lacks values \(KeyError"):
        train(addition(), tmp_path)
