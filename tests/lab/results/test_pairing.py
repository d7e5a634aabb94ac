"""Runs are compared only when their hashes prove that they shared everything but the optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import tasks
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results import pairing
from gomuon.lab.results.runs import Run, load_run
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import addition, characters, corpus_on_disk


def hashes_of(config: RunConfig, data_dir: Path | None = None) -> dict[str, str]:
    task = tasks.build(config, data_dir)
    return pairing.hashes(task, task.model())


def test_arms_of_one_seed_agree_whatever_their_optimizer_and_rate() -> None:
    first = hashes_of(addition(optimizer="adamw", lr=0.1))
    second = hashes_of(addition(optimizer="go-muon", lr=0.08, options={"refresh_every": 1}))
    assert first == second
    assert pairing.differing_fields(first, second) == []


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"seed": 1}, ["corpus", "stream", "parameters"]),
        ({"steps": 13}, ["schedule"]),
        ({"hidden": 12}, ["model", "parameters"]),
        ({"heads": 1}, ["model"]),
        ({"modulus": 6}, ["corpus", "model", "stream", "parameters"]),
    ],
)
def test_each_difference_shows_in_its_field(change: dict[str, Any], fields: list[str]) -> None:
    assert pairing.differing_fields(hashes_of(addition()), hashes_of(addition(**change))) == fields


def test_corpus_and_stream_of_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus_on_disk(tmp_path / "data", monkeypatch)
    first = hashes_of(characters(), data)
    assert pairing.differing_fields(first, hashes_of(characters(batch=3), data)) == ["stream"]
    assert pairing.differing_fields(first, hashes_of(characters(length=9), data)) == [
        "model",
        "stream",
    ]


def test_parameter_hash_sees_names_shapes_and_every_bit() -> None:
    model = torch.nn.Linear(3, 2)
    before = pairing.hash_parameters(model)
    assert before == pairing.hash_parameters(model)
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    assert pairing.hash_parameters(model) != before
    flat = torch.arange(6.0)
    assert pairing.hash_value(flat) != pairing.hash_value(flat.view(2, 3))
    assert pairing.hash_value(flat) != pairing.hash_value(flat.int())


def trained(folder: Path, **changes: Any) -> Run:
    train(addition(**changes), folder)
    return load_run(folder)


def test_a_pair_is_accepted_and_a_mismatch_named(tmp_path: Path) -> None:
    control = trained(tmp_path / "control")
    candidate = trained(tmp_path / "candidate", lr=0.05, arm="other")
    other = trained(tmp_path / "other", seed=1)
    assert pairing.differing_fields(control.hashes, candidate.hashes) == []
    pairing.require_pair(control, candidate)
    with pytest.raises(LabError, match="their corpus hashes differ"):
        pairing.require_pair(control, other)


@pytest.mark.parametrize("field", pairing.FIELDS)
def test_a_tampered_or_missing_hash_is_refused_by_name(field: str, tmp_path: Path) -> None:
    run = trained(tmp_path)
    without = {name: value for name, value in run.hashes.items() if name != field}
    for hashes in (run.hashes | {field: "0" * 64}, without):
        forged = dataclasses.replace(run, hashes=hashes)
        with pytest.raises(LabError, match=f"their {field} hashes differ"):
            pairing.require_pair(run, forged)
    bare = dataclasses.replace(run, hashes={})
    with pytest.raises(LabError, match="may not be compared"):
        pairing.require_pair(bare, bare)
