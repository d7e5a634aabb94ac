"""Callbacks of Transformers' Trainer and of Lightning watch from the first step to the last."""

from pathlib import Path
from typing import Any

import pytest

from gomuon import GoMuon
from gomuon.watching.records import WatchRecord

WHY = "in the test extra: pip install '.[test]'"
pytest.importorskip("accelerate", reason=WHY, exc_type=ModuleNotFoundError)
pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)
pytest.importorskip("pytorch_lightning", reason=WHY, exc_type=ModuleNotFoundError)


def test_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    from gomuon.integrations.transformers import WatchTraining
    from tests.integrations.test_transformers import arguments, gpt2, sentences

    model = gpt2()
    optimizer = GoMuon(model, lr=0.02)
    records: list[WatchRecord] = []
    callback = WatchTraining(every=4, to=records.extend, doctor=True)
    trainer = transformers.Trainer(
        model=model,
        train_dataset=sentences(),
        optimizers=(optimizer, None),
        args=arguments(tmp_path),
        callbacks=[callback],
    )
    trainer.train()
    assert {record.step for record in records} == {4, 8}
    assert {r.layer for r in records} == {
        route.name for route in optimizer.routing_table().treated("matrix")
    }
    assert not optimizer._step.observers, "it was removed"
    assert capsys.readouterr().out.strip()


def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pytorch_lightning as lightning
    from pytorch_lightning.loggers import CSVLogger

    from gomuon.integrations.lightning import WatchFit
    from tests.integrations.test_lightning import Automatic, loader

    logger = CSVLogger(str(tmp_path), name="run", flush_logs_every_n_steps=1)
    records: list[WatchRecord] = []
    module: Any = Automatic()
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1000,
        default_root_dir=tmp_path,
        callbacks=[WatchFit(every=3), WatchFit(every=5, to=records.extend, doctor=True)],
    )
    trainer.fit(module, loader())
    assert {record.step for record in records} == {5, 10}
    optimizer: Any = trainer.optimizers[0]
    assert not optimizer._step.observers
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert text.startswith("gomuon/net.")
    assert len(text.splitlines()) == 1 + 3
    assert capsys.readouterr().out.strip()
