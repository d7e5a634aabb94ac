"""Fine-tuning with LoRA: a vision transformer that knows digits learns them turned and inverted.

The base is trained before the run, from the run's seed, and kept in a cache: all arms start from
the same bytes. Then it is frozen, and every linear layer of its blocks gets two thin matrices of
rank 4 beside it (arXiv 2106.09685); these and the classifier are trained.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.digits import DigitsTask, DigitsViT, evaluation, loss_on
from gomuon.lab.experiments.pretrained import Weights, cached
from gomuon.lab.experiments.run_config import RunConfig

RANK, ALPHA = 4, 8.0
BASE_STEPS, BASE_RATE = 300, 3e-3  # of the base, by AdamW


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus (α / rank) · B A, which is zero at the start."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.reduce = nn.Linear(base.in_features, RANK, bias=False)
        self.expand = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.expand.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + ALPHA / RANK * self.expand(self.reduce(x))
        return out


def add_adapters(model: DigitsViT) -> None:
    """Freeze everything but the classifier, and adapt every linear layer of the blocks."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        for module in list(block.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(module, name, AdaptedLinear(layer))


class DigitsLoRATask:
    """Classify digits that are turned by 90° and inverted, from a model of the upright ones."""

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.upright = DigitsTask(
            dataclasses.replace(config, task="digits-vit", steps=BASE_STEPS, evaluate_every=1)
        )
        streams = torch.Generator().manual_seed(config.seed)
        size = (config.steps, config.batch)
        self.train, self.test = _changed(self.upright.train), _changed(self.upright.test)
        self.chosen = torch.randint(len(self.train[1]), size, generator=streams)

    def model(self) -> nn.Module:
        config = self.config
        base = self.upright.model()
        assert isinstance(base, DigitsViT)
        facts = {**self._facts(), "seed": config.seed}
        base.load_state_dict(cached(facts, config.threads, self._pretrain))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(config.seed)
            add_adapters(base)
        return base

    def _facts(self) -> dict[str, Any]:
        """What makes the base and its adapters, besides the seed."""
        shape = {name: getattr(self.config, name) for name in ("width", "layers", "heads")}
        return {
            "kind": self.config.task,
            "hidden": self.config.hidden,
            **shape,
            "base": {"steps": BASE_STEPS, "rate": BASE_RATE, "batch": self.config.batch},
        }

    def _pretrain(self) -> Weights:
        """The weights of a vision transformer trained on the upright digits."""
        model = self.upright.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE, weight_decay=0.0)
        for step, multiplier in enumerate(self.upright.multipliers(), start=1):
            for group in optimizer.param_groups:
                group["lr"] = BASE_RATE * multiplier
            optimizer.zero_grad()
            loss, _ = self.upright.loss(model, step)
            loss.backward()
            optimizer.step()
        return model.state_dict()

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.chosen,
            "corpus": self.train[0],
            "model": {**self._facts(), "rank": RANK, "alpha": ALPHA},
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        return loss_on(model, self.train, self.chosen[step - 1]), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        return evaluation(model, self.test)


def _changed(pictures_and_labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    pictures, labels = pictures_and_labels
    return -pictures.rot90(1, (2, 3)).contiguous(), labels
