"""Transformers' Trainer on two ranks: its checkpoints hold the whole state."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.distributed.divided_state import is_only_count
from gomuon.errors import GeometryWarning
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, weights
from tests.integrations.ranks import as_torchrun_does
from tests.integrations.test_transformers import (
    double_loss,
    llama,
    losses,
    optimizer_of,
    trainer,
)

STEPS, SAVED_AT = 6, 3  # between two refreshes, so the maps of the checkpoint are used
PART = "only this rank's part"


def make(
    folder: Path, seed: int = 0, batch: int = 4, callbacks: bool = True, **options: Any
) -> Any:
    """In float64, so that one process equals two up to its rounding."""
    from gomuon.integrations.transformers import GatherState  # not if Transformers is missing

    model = llama(seed).double()
    # In turns also in one process, which is compared with the ranks.
    optimizer = optimizer_of(model, stagger=True)
    run = trainer(
        model, folder, optimizer, max_steps=STEPS, per_device_train_batch_size=batch, **options
    )
    run.compute_loss_func = double_loss
    if callbacks:
        run.add_callback(GatherState())
    return run


def checkpoint(folder: Path) -> str:
    return str(folder / f"checkpoint-{SAVED_AT}")


def whole_and_resumed(place: Place, target: Path) -> tuple[Weights, Weights, list[float], set[int]]:
    as_torchrun_does(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        whole = make(target, save_strategy="steps", save_steps=SAVED_AT)
        whole.train()
        resumed = make(target / "again", seed=99)
        resumed.train(resume_from_checkpoint=checkpoint(target))
    owners = set(resumed.optimizer.optimizer.owners().values())
    return weights(whole.model), weights(resumed.model), losses(whole), owners


def test_a_checkpoint_of_two_ranks_is_resumed_by_two_and_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    answers = launch(2, whole_and_resumed, tmp_path, target=folder)
    for whole, resumed, _, owners in answers:
        assert owners == {0, 1}  # otherwise nothing had to be gathered
        assert_alike([answers[0][0], whole, resumed])
    one = make(folder / "one", seed=99, batch=8)
    one.train(resume_from_checkpoint=checkpoint(folder))
    assert distance(weights(one.model), answers[0][0]) < 1e-9
    # The Trainer logs in float32.
    assert losses(one)[SAVED_AT:] == pytest.approx(answers[0][2][SAVED_AT:], abs=1e-6)


SAVING: dict[str, dict[str, Any]] = {
    "steps": {"save_steps": 2},
    "epoch": {},
    "best": {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
    "without the callback": {"save_strategy": "steps", "save_steps": 2, "callbacks": False},
}


def saved(place: Place, target: Path) -> dict[str, tuple[list[str], list[str]]]:
    """For each way of saving: matrices whose state the checkpoints lack, and warnings."""
    as_torchrun_does(place)
    found = {}
    for name, options in SAVING.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make(target / name, **{"save_strategy": name, **options}).train()
        torch.distributed.barrier()  # rank 0 has written
        files = sorted((target / name).glob("checkpoint-*/optimizer.pt"))
        assert files, name
        lacking = [
            f"{file.parent.name} {number}"
            for file in files
            for number, entries in torch.load(file, weights_only=True)["state"].items()
            if is_only_count(entries)
        ]
        words = [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]
        found[name] = lacking, words
    return found


def test_every_way_of_saving_is_whole_and_a_part_is_told_of(tmp_path: Path) -> None:
    answers = launch(2, saved, tmp_path, target=tmp_path / "runs")
    for rank, answer in enumerate(answers):
        lacking, told = answer.pop("without the callback")
        assert lacking
        assert [PART in words and "GatherState()" in words for words in told] == [True] * (not rank)
        assert answer == dict.fromkeys(answer, ([], []))
