"""The tasks of a run: character models, GPTs, experts, digits, modular addition and regression.

A task determines all that two paired arms must share: the initial parameters, the sequence of
minibatches and the schedule. All of it follows from the seed and does not depend on the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab import machine
from gomuon.lab.data import corpora
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.experiments import own_code, own_tasks, schedules
from gomuon.lab.experiments.adapters import DigitsLoRATask
from gomuon.lab.experiments.digits import DigitsTask
from gomuon.lab.experiments.expert_mixture import ExpertMixtureTask
from gomuon.lab.experiments.gpt import LayerNormGPT
from gomuon.lab.experiments.held_out_text import HeldOutTextTask, next_symbol_loss, text_loss
from gomuon.lab.experiments.models import CharacterModel, ModularAdditionModel
from gomuon.lab.experiments.regression import RegressionTask
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig

_HELD_OUT: dict[str, Any] = {"steps": 1000, "adamw_lr": 3e-3, "evaluate_every": 250}
_DIGITS: dict[str, Any] = {"steps": 300, "adamw_lr": 3e-3, "batch": 64, "evaluate_every": 50}
# Defaults of `race`: the paper's shapes, and a smaller modulus.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ptb": {"steps": 1000, "adamw_lr": 3e-3},
    "shakespeare": {"steps": 1000, "adamw_lr": 3e-3},
    "gpt": {"steps": 1000, "adamw_lr": 3e-3},
    "ptb-validation": _HELD_OUT,
    "shakespeare-validation": _HELD_OUT,
    "gpt-validation": _HELD_OUT,
    "nanogpt": {
        "steps": 2000,
        "adamw_lr": 1e-3,
        "layers": 4,
        "hidden": 512,
        "length": 64,
        "batch": 12,
        "evaluate_every": 500,
    },
    "digits-vit": {**_DIGITS, "width": 64, "layers": 2, "hidden": 128},
    "digits-conv": {**_DIGITS, "width": 32, "layers": 3},
    "digits-lora": {**_DIGITS, "steps": 200, "width": 64, "layers": 2, "hidden": 128},
    "experts": {
        "steps": 600,
        "adamw_lr": 3e-3,
        "width": 64,
        "layers": 2,
        "hidden": 128,
        "length": 64,
        "evaluate_every": 150,
    },
    "regression": {
        "steps": 500,
        "adamw_lr": 3e-3,
        "width": 128,
        "hidden": 64,
        "batch": 256,
        "evaluate_every": 25,
    },
    "grokking": {"steps": 350, "adamw_lr": 1e-2, "modulus": 59, "width": 64, "hidden": 192},
}
# The corpus of each task that has one. "gpt" is a GPT with LayerNorm on Tiny Shakespeare, and
# "nanogpt" the recipe for small machines in nanoGPT's README, with a loss on held-out text.
CORPUS = {
    "ptb": "ptb",
    "shakespeare": "shakespeare",
    "gpt": "shakespeare",
    "nanogpt": "shakespeare",
    "ptb-validation": "ptb",
    "shakespeare-validation": "shakespeare",
    "gpt-validation": "shakespeare",
    "experts": "shakespeare",
}


class Task(Protocol):
    """The task of one run; all its random numbers come from the run's seed."""

    max_norm: float | None
    """Gradients are clipped to this norm before each update; None: they are not clipped."""

    def model(self) -> nn.Module:
        """The model with its initial parameters."""
        ...

    def multipliers(self) -> list[float]:
        """The schedule, one multiplier per update."""
        ...

    def fingerprints(self) -> dict[str, Any]:
        """What is hashed to prove that two runs have the same minibatches, corpus and model."""
        ...

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss before update ``step`` (from 1), and further values to record."""
        ...

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        """Values to record after update ``step``; empty if no evaluation is due."""
        ...


class CharacterTask:
    """Next-character prediction on random sequences of a corpus's training text."""

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.corpus = corpora.load(CORPUS[config.task], data_dir)
        room = len(self.corpus.tokens) - config.length
        if room < 1:
            raise LabError(
                f"length {config.length} is too long for {config.task}, "
                f"which has {len(self.corpus.tokens)} characters"
            )
        generator = torch.Generator().manual_seed(config.seed)
        # One row per update, so that a shorter run sees the first batches of a longer one.
        self.offsets = torch.randint(room, (config.steps, config.batch), generator=generator)
        self.positions = torch.arange(config.length + 1)

    def model(self) -> nn.Module:
        symbols, generator = len(self.corpus.vocabulary), torch.Generator()
        generator.manual_seed(self.config.seed)
        if self.config.task == "gpt":
            return LayerNormGPT(
                symbols, self.config.length, **_shape(self.config), generator=generator
            )
        return CharacterModel(symbols, **_shape(self.config), generator=generator)

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.offsets,
            "corpus": self.corpus.sha256,
            "model": {
                "kind": "gpt" if self.config.task == "gpt" else "character",
                "vocabulary": len(self.corpus.vocabulary),
                "length": self.config.length,
                **_shape(self.config),
            },
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        windows = self.corpus.tokens[self.offsets[step - 1].unsqueeze(1) + self.positions]
        return next_symbol_loss(model, windows), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        return {}


class NanoGPTTask:
    """nanoGPT's recipe for small machines: nine tenths of the text train, the rest is held out.

    As in its train.py: no biases, smaller residual layers, gradients clipped to norm 1, a warm-up
    of 100 updates and a cosine to a tenth of the rate. The held-out text is evaluated whole.
    """

    max_norm: float | None = 1.0

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.corpus = corpora.load(CORPUS[config.task], data_dir)
        held_out = len(self.corpus.tokens) // 10
        self.train, self.validation = self.corpus.tokens.split(
            [len(self.corpus.tokens) - held_out, held_out]
        )
        room = held_out - config.length
        if room < 1:
            raise LabError(
                f"length {config.length} is too long for {config.task}, whose held-out text has "
                f"{held_out} characters"
            )
        generator = torch.Generator().manual_seed(config.seed)
        last = len(self.train) - config.length
        self.offsets = torch.randint(last, (config.steps, config.batch), generator=generator)
        self.positions = torch.arange(config.length + 1)

    def model(self) -> nn.Module:
        return LayerNormGPT(
            len(self.corpus.vocabulary),
            self.config.length,
            **_shape(self.config),
            biases=False,
            scaled_residuals=True,
            generator=torch.Generator().manual_seed(self.config.seed),
        )

    def multipliers(self) -> list[float]:
        return schedules.warmup_then_cosine(self.config.steps, warmup=100, floor=0.1)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.offsets,
            "corpus": self.corpus.sha256,
            "model": {
                "kind": "nanogpt",
                "vocabulary": len(self.corpus.vocabulary),
                "length": self.config.length,
                **_shape(self.config),
            },
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        windows = self.train[self.offsets[step - 1].unsqueeze(1) + self.positions]
        return next_symbol_loss(model, windows), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        return {VALIDATION_LOSS: text_loss(model, self.validation, self.config.length)}


class ModularAdditionTask:
    """a + b mod p, trained on half of all pairs in one batch, tested on the other half."""

    max_norm: float | None = None

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
            "stream": self.chosen,  # the one batch of every update, in its order
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


TASKS: dict[str, Callable[[RunConfig, str | Path | None], Task]] = {
    "ptb": CharacterTask,
    "shakespeare": CharacterTask,
    "gpt": CharacterTask,
    "nanogpt": NanoGPTTask,
    "digits-vit": DigitsTask,
    "digits-conv": DigitsTask,
    "ptb-validation": HeldOutTextTask,
    "shakespeare-validation": HeldOutTextTask,
    "gpt-validation": HeldOutTextTask,
    "digits-lora": DigitsLoRATask,
    "experts": ExpertMixtureTask,
    "regression": RegressionTask,
    "grokking": ModularAdditionTask,
}


def check_name(name: str) -> str:
    if own_code.is_own(name):
        own_tasks.load(name)
    elif name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return name


def title(name: str) -> str:
    """In titles: a name of ours, or "Rings (own_task.py)"; imports nothing."""
    return own_code.title(name) if own_code.is_own(name) else name


def defaults(name: str) -> dict[str, Any]:
    """RunConfig fields that a race on a task takes if none are given.

    Raises:
        LabError: the task is unknown.
    """
    if own_code.is_own(name):
        return own_tasks.defaults(name)
    return dict(DEFAULTS[check_name(name)])


def build(config: RunConfig, data_dir: str | Path | None = None) -> Task:
    """The task of a run.

    Raises:
        LabError: the task is unknown, its corpus is not available, or a number does not fit.
    """
    if own_code.is_own(config.task):
        return own_tasks.AdaptedTask(config)
    kind = TASKS[check_name(config.task)]
    _require_memory(config)
    return kind(config, data_dir)


def _require_memory(config: RunConfig) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated."""
    least, there = least_bytes(config), machine.memory()
    if least > there:
        raise LabError(
            f"one update would need more than {least / 1e9:,.0f} GB of memory, and this machine "
            f"has {there / 1e9:,.0f} GB; give a smaller width, hidden, layers, modulus, length, "
            "batch or number of steps"
        )


def least_bytes(config: RunConfig) -> int:
    """A lower bound of the memory of one update, computed from the shapes."""
    if config.task == "grokking":
        examples, positions, symbols = config.modulus**2 // 2, 3, config.modulus
        logits, stream = examples * symbols, config.modulus**2
    else:
        examples, positions = config.batch, config.length
        logits, stream = examples * positions, config.steps * config.batch
        symbols = 1  # the corpus is not read yet
    layer = config.width * (4 * config.width + 3 * config.hidden)
    weights = config.layers * layer + symbols * config.width
    kept = examples * positions * config.layers * (4 * config.width + 3 * config.hidden)
    # Weights, gradients and momentum; activations for the backward pass; int64 indices; and the
    # schedule as a list.
    return 4 * (3 * weights + kept + logits) + 8 * stream + 32 * config.steps


def build_model(task: Task) -> nn.Module:
    """The task's model; a shape that does not fit becomes a LabError."""
    try:
        return task.model()
    except (
        ValueError,
        RuntimeError,
        MemoryError,
    ) as error:  # no memory: RuntimeError
        raise LabError(f"this model cannot be built: {error}") from error


def _shape(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("width", "layers", "heads", "hidden")}


def _accuracy(logits: Tensor, targets: Tensor) -> float:
    return (logits.detach().argmax(dim=1) == targets).double().mean().item()
