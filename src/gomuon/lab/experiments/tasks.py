"""The tasks a run can train on: character models of two corpora, and modular addition.

A task fixes everything two paired arms must share: the initial parameters, the stream of
minibatches and the schedule, all drawn from the run's seed and never from the optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab import machine
from gomuon.lab.data import corpora
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.models import CharacterModel, ModularAdditionModel
from gomuon.lab.experiments.run_config import RunConfig

# What `race` uses when nothing is said; the paper's own shapes, and a modulus of demo size.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ptb": {"steps": 1000, "adamw_lr": 3e-3},
    "shakespeare": {"steps": 1000, "adamw_lr": 3e-3},
    "grokking": {"steps": 350, "adamw_lr": 1e-2, "modulus": 59, "width": 64, "hidden": 192},
}


class Task(Protocol):
    """One configured task; everything it draws comes from the run's seed."""

    def model(self) -> nn.Module:
        """The model with its initial parameters."""
        ...

    def multipliers(self) -> list[float]:
        """The schedule, one multiplier per update."""
        ...

    def fingerprints(self) -> dict[str, Any]:
        """What stands for the minibatch stream, the corpus and the model when runs are paired."""
        ...

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of update ``step`` (from 1) before it happens, and what to record beside it."""
        ...

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        """What to record after update ``step``; empty unless an evaluation is due."""
        ...


class CharacterTask:
    """Next-character prediction on random windows of a corpus; only its training text is read."""

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.corpus = corpora.load(config.task, data_dir)
        room = len(self.corpus.tokens) - config.length
        if room < 1:
            raise LabError(
                f"length {config.length} is too long for {config.task}, "
                f"which has {len(self.corpus.tokens)} characters"
            )
        generator = torch.Generator().manual_seed(config.seed)
        # Drawn up front and row by row, so that a shorter run sees a prefix of a longer one.
        self.offsets = torch.randint(room, (config.steps, config.batch), generator=generator)
        self.positions = torch.arange(config.length + 1)

    def model(self) -> nn.Module:
        return CharacterModel(
            len(self.corpus.vocabulary),
            **_shape(self.config),
            generator=torch.Generator().manual_seed(self.config.seed),
        )

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.offsets,
            "corpus": self.corpus.sha256,
            "model": {
                "kind": "character",
                "vocabulary": len(self.corpus.vocabulary),
                "length": self.config.length,
                **_shape(self.config),
            },
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        windows = self.corpus.tokens[self.offsets[step - 1].unsqueeze(1) + self.positions]
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        return {}


class ModularAdditionTask:
    """a + b mod p from half of all pairs, full batch; the other half shows whether it groks."""

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        if config.modulus < 2:
            raise LabError(f"modulus must be at least 2, not {config.modulus}")
        self.config = config
        numbers = torch.arange(config.modulus)
        pairs = torch.cartesian_prod(numbers, numbers)
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(pairs), generator=generator)
        self.chosen = order[: len(pairs) // 2]  # rounded down, as in the paper
        self.train, self.test = pairs[self.chosen], pairs[order[len(pairs) // 2 :]]

    def model(self) -> nn.Module:
        return ModularAdditionModel(
            self.config.modulus,
            **_shape(self.config),
            generator=torch.Generator().manual_seed(self.config.seed),
        )

    def multipliers(self) -> list[float]:
        return schedules.warmup_then_constant(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.chosen,  # the one batch every update sees, in its order
            "corpus": {"modulus": self.config.modulus, "train": sorted(self.chosen.tolist())},
            "model": {
                "kind": "modular addition",
                "modulus": self.config.modulus,
                **_shape(self.config),
            },
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        logits, sums = model(self.train), self._sums(self.train)
        return F.cross_entropy(logits, sums), {"train_accuracy": _accuracy(logits, sums)}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every:
            return {}
        with torch.no_grad():
            return {"test_accuracy": _accuracy(model(self.test), self._sums(self.test))}

    def _sums(self, pairs: Tensor) -> Tensor:
        return pairs.sum(dim=1) % self.config.modulus


TASKS: dict[str, type[CharacterTask] | type[ModularAdditionTask]] = {
    "ptb": CharacterTask,
    "shakespeare": CharacterTask,
    "grokking": ModularAdditionTask,
}


def check_name(name: str) -> str:
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return name


def build(config: RunConfig, data_dir: str | Path | None = None) -> Task:
    """The task of a run.

    Raises:
        LabError: the task is unknown, its corpus is not to be had, or a number does not fit.
    """
    kind = TASKS[check_name(config.task)]
    _require_memory(config)
    return kind(config, data_dir)


def _require_memory(config: RunConfig) -> None:
    """Refuse what cannot fit into this machine before a byte of it is made."""
    least, there = least_bytes(config), machine.memory()
    if least > there:
        raise LabError(
            f"one update would take more than {least / 1e9:,.0f} GB of memory, and this machine "
            f"has {there / 1e9:,.0f} GB; give a smaller width, hidden, layers, modulus, length, "
            "batch or number of steps"
        )


def least_bytes(config: RunConfig) -> int:
    """A lower bound of the memory of one update, from the shape alone."""
    if config.task == "grokking":
        examples, positions, symbols = config.modulus**2 // 2, 3, config.modulus
        logits, stream = examples * symbols, config.modulus**2
    else:
        examples, positions = config.batch, config.length
        logits, stream = examples * positions, config.steps * config.batch
        symbols = 1  # of its corpus, which is not read yet
    layer = config.width * (4 * config.width + 3 * config.hidden)
    weights = config.layers * layer + symbols * config.width
    kept = examples * positions * config.layers * (4 * config.width + 3 * config.hidden)
    # Weights, their gradients and a momentum; what the backward pass needs; int64 indices; and the
    # schedule as a list.
    return 4 * (3 * weights + kept + logits) + 8 * stream + 32 * config.steps


def build_model(task: Task) -> nn.Module:
    """The task's model, with a shape that does not fit reported as a user's error."""
    try:
        return task.model()
    except (ValueError, RuntimeError, MemoryError) as error:  # torch has no memory error of its own
        raise LabError(f"this model cannot be built: {error}") from error


def _shape(config: RunConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("width", "layers", "heads", "hidden")}


def _accuracy(logits: Tensor, targets: Tensor) -> float:
    return (logits.detach().argmax(dim=1) == targets).double().mean().item()
