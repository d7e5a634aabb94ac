"""Lightning, as docs/integrations.md says to use it."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gomuon import GoMuon
from gomuon.optimizer import MatrixOptimizer
from tests.models import mlp

lightning = pytest.importorskip(
    "pytorch_lightning",
    reason="pytorch-lightning is in the test extra: pip install '.[test]'",
    exc_type=ModuleNotFoundError,  # missing is a reason to skip, broken is not
)

BATCHES, BATCH = 10, 16  # an epoch ends in the midst of a refresh cycle, accumulated or not
LR, ADAMW_LR, DECAY = 0.05, 0.01, 0.9


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning advises on workers and loggers, which is beside the point here."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        yield


def data(epochs: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Ten batches, the same in every epoch."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCHES * BATCH, 6, generator=generator, dtype=torch.float64).cumsum(1)
    y = (x[:, :2].sum(1) > 0).long() + (x[:, 2] * x[:, 3] > 0)
    return [(a, b) for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True)] * epochs


def loader() -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


class Automatic(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """The module of the documentation: Lightning does backward, accumulation and step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = mlp(6, 12, 12, 3, seed=seed)
        self.stagger: Any = "auto"
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = GoMuon(self, lr=LR, adamw={"lr": ADAMW_LR}, stagger=self.stagger)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Automatic):
    """Backward, accumulation and step in the module's own hands."""

    accumulated = 1

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / self.accumulated)
        if (batch_idx + 1) % self.accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss


class ManualByTwo(Manual):
    accumulated = 2


def fit(
    module: Automatic, folder: Path, *, epochs: int = 2, resume: Path | None = None, **options: Any
) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        logger=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(), ckpt_path=resume, weights_only=True)
    return trainer


def plain(module: Automatic, accumulated: int, epochs: int = 2) -> MatrixOptimizer:
    """The same training in a loop of our own."""
    (optimizer,), (schedule,) = module.configure_optimizers()
    for index, (x, y) in enumerate(data(epochs), start=1):
        (F.cross_entropy(module.net(x), y) / accumulated).backward()
        if index % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule["scheduler"].step()
    return optimizer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10, msg=name)


def assert_captured(module: nn.Module, optimizer: MatrixOptimizer) -> None:
    for name, sizes in (("net.0.weight", (12, 6)), ("net.2.weight", (12, 12))):
        state = optimizer.state[module.get_parameter(name)]
        for side, size in zip(("left_map", "right_map"), sizes, strict=True):
            assert state[side].shape == (1, size, size)
            scaled = state[side][0] / state[side][0].diagonal().mean()
            assert not torch.allclose(scaled, torch.eye(size).double(), atol=1e-2), (name, side)
        assert "failures" not in state


WAYS = [
    pytest.param(Automatic, 1, {}, id="automatic"),
    pytest.param(Automatic, 2, {"accumulate_grad_batches": 2}, id="automatic, accumulated"),
    pytest.param(Manual, 1, {}, id="manual"),
    # In manual mode Lightning drops the gradients before it validates, so here after whole steps.
    pytest.param(ManualByTwo, 2, {"val_check_interval": 6}, id="manual, accumulated"),
]


def test_parameters_are_routed_as_those_of_the_bare_model() -> None:
    module = Automatic()
    inner = {f"net.{r.name}": r.treatment for r in GoMuon(module.net).routing_table()}
    assert {r.name: r.treatment for r in GoMuon(module).routing_table()} == inner
    assert inner["net.2.weight"] == "matrix"
    assert inner["net.4.weight"] == "adamw"  # the head


@pytest.mark.parametrize(("kind", "accumulated", "options"), WAYS)
def test_trains_as_a_plain_loop_does(
    kind: type[Automatic], accumulated: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Validation comes between training batches, and before the first."""
    module, reference = kind(), Automatic()
    trainer = fit(module, tmp_path, **{"val_check_interval": 3, **options})
    optimizer = trainer.optimizers[0]
    expected = plain(reference, accumulated)
    assert_same(module, reference)
    assert_captured(module, optimizer)
    assert sum(module.losses[-5:]) < 0.8 * sum(module.losses[:5])
    steps = 2 * BATCHES // accumulated
    assert optimizer.param_groups[0]["step"] == expected.param_groups[0]["step"] == steps
    for group, lr in zip(optimizer.param_groups, (LR, ADAMW_LR), strict=True):
        assert group["lr"] == pytest.approx(lr * DECAY**steps)


@pytest.mark.parametrize(("kind", "accumulated", "options"), WAYS)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    kind: type[Automatic], accumulated: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole, first, resumed = kind(), kind(), kind(seed=9)
    fit(whole, tmp_path, **options)
    fit(first, tmp_path, epochs=1, **options).save_checkpoint(tmp_path / "half.ckpt")
    trainer = fit(resumed, tmp_path, resume=tmp_path / "half.ckpt", **options)
    assert trainer.global_step == 2 * BATCHES // accumulated
    assert resumed.losses == pytest.approx(whole.losses[BATCHES:], abs=1e-10)
    assert_same(whole, resumed)


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}])
def test_what_lightning_adds_leaves_the_geometry_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    module = Automatic()
    trainer = fit(module, tmp_path, epochs=3, **options)
    assert sum(module.losses[-5:]) < 0.9 * sum(module.losses[:5])
    assert_captured(module, trainer.optimizers[0])
