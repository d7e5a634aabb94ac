"""Lightning on two ranks: its checkpoints hold the whole state, and nobody has to ask for it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gomuon.distributed.divided_state import is_only_count
from gomuon.errors import GeometryWarning
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, weights
from tests.integrations.ranks import as_torchrun_does
from tests.integrations.test_lightning import BATCH, Automatic, Manual, data, lightning

KINDS: dict[str, type[Automatic]] = {"automatic": Automatic, "manual": Manual}
SAVED = "half.ckpt"


def batches(ranks: int, rank: int) -> DataLoader[Any]:
    """This rank's part of every batch; Lightning is told not to divide them again."""
    parts = [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in data()]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=BATCH // ranks)


def fit(
    module: Automatic, folder: Path, place: Place | None, *, epochs: int = 2, resume: Any = None
) -> Any:
    ranks, rank = (1, 0) if place is None else (place.size, place.rank)
    several: dict[str, Any] = {
        "strategy": lightning.strategies.DDPStrategy(process_group_backend="gloo"),
        "use_distributed_sampler": False,
    }
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=ranks, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        logger=False, **({} if place is None else several),
    )  # fmt: skip
    trainer.fit(module, batches(ranks, rank), ckpt_path=resume, weights_only=True)
    return trainer


def made(kind: str, seed: int = 0) -> Automatic:
    """In turns also in one process, which is compared with the ranks."""
    module = KINDS[kind](seed=seed)
    module.stagger = True
    return module


def whole_and_resumed(
    place: Place, kind: str, target: Path
) -> tuple[Weights, Weights, set[int], list[str]]:
    as_torchrun_does(place)
    whole, first, resumed = made(kind), made(kind), made(kind, seed=9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(whole, target, place)
        fit(first, target, place, epochs=1).save_checkpoint(target / SAVED)
        trainer = fit(resumed, target, place, resume=target / SAVED)
    words = [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]
    owners = set(trainer.optimizers[0].owners().values())
    return weights(whole.net), weights(resumed.net), owners, words


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_is_resumed_by_two_and_by_one(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "run"
    answers = launch(2, whole_and_resumed, tmp_path, kind=kind, target=target)
    for whole, resumed, owners, told in answers:
        assert owners == {0, 1}  # otherwise nothing had to be gathered
        assert told == []
        assert_alike([answers[0][0], whole, resumed])
    (state,) = torch.load(target / SAVED, weights_only=True)["optimizer_states"]
    assert not any(map(is_only_count, state["state"].values()))
    one = made(kind, seed=9)
    fit(one, target, None, resume=target / SAVED)
    assert distance(weights(one.net), answers[0][0]) < 1e-9
