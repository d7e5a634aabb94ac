"""Next-symbol prediction, and the character models with a loss on text they do not train on.

The paper's protocol reads no held-out text, so its tasks ("ptb", "shakespeare") stay as they are
and these have names of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.data import corpora
from gomuon.lab.data.corpora import Corpus
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.gpt import LayerNormGPT
from gomuon.lab.experiments.models import CharacterModel
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig

PTB_VALIDATION = "ptb-valid"  # the treebank's own validation text
KINDS: dict[str, type[CharacterModel] | type[LayerNormGPT]] = {
    "ptb-validation": CharacterModel,
    "shakespeare-validation": CharacterModel,
    "gpt-validation": LayerNormGPT,
}


def next_symbol_loss(logits: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """The mean loss of predicting each symbol of the windows from those before it."""
    return F.cross_entropy(logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def text_loss(logits: Callable[[Tensor], Tensor], text: Tensor, length: int) -> float:
    """The mean loss over a whole text, cut into windows that share no predicted symbol."""
    starts = torch.arange(0, len(text) - length, length)
    positions = torch.arange(length + 1)
    losses = []
    with torch.no_grad():
        for some in starts.split(64):
            windows = text[some.unsqueeze(1) + positions]
            losses.append(next_symbol_loss(logits, windows).item() * len(some))
    return math.fsum(losses) / len(starts)


class SplitText:
    """A text that is trained on, one that is not, and where the windows of every update start."""

    def __init__(self, corpus: Corpus, config: RunConfig, data_dir: str | Path | None) -> None:
        self.vocabulary = len(corpus.vocabulary)
        if corpus.name == "ptb":
            other = corpora.load(PTB_VALIDATION, data_dir)
            self.train, self.validation = corpus.tokens, _encode(other, corpus)
            self.sha256 = [corpus.sha256, other.sha256]
        else:
            held_out = len(corpus.tokens) // 10
            self.train = corpus.tokens[:-held_out]
            self.validation = corpus.tokens[-held_out:]
            self.sha256 = [corpus.sha256, "the last tenth is held out"]
        shorter = min(len(self.train), len(self.validation))
        if shorter <= config.length:
            raise LabError(
                f"length {config.length} is too long for {config.task}, whose shorter text has "
                f"{shorter} characters"
            )
        generator = torch.Generator().manual_seed(config.seed)
        room = len(self.train) - config.length
        # One row per update, so that a shorter run sees the first batches of a longer one.
        self.offsets = torch.randint(room, (config.steps, config.batch), generator=generator)
        self.positions = torch.arange(config.length + 1)

    def batch(self, step: int) -> Tensor:
        """The windows [batch, length + 1] of an update, from 1."""
        return self.train[self.offsets[step - 1].unsqueeze(1) + self.positions]


class HeldOutTextTask:
    """The paper's character model, or the GPT with LayerNorm, judged by text it does not train on.

    Penn Treebank has a validation text of its own; of Tiny Shakespeare the last tenth is held out,
    as in nanoGPT. It is evaluated whole.
    """

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        name = "ptb" if config.task == "ptb-validation" else "shakespeare"
        self.text = SplitText(corpora.load(name, data_dir), config, data_dir)
        shape = ("width", "layers", "heads", "hidden")
        self.shape: dict[str, Any] = {part: getattr(config, part) for part in shape}

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(self.config.seed)
        if KINDS[self.config.task] is LayerNormGPT:
            return LayerNormGPT(
                self.text.vocabulary, self.config.length, **self.shape, generator=generator
            )
        return CharacterModel(self.text.vocabulary, **self.shape, generator=generator)

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.text.offsets,
            "corpus": self.text.sha256,
            "model": {
                "kind": KINDS[self.config.task].__name__,
                "vocabulary": self.text.vocabulary,
                "length": self.config.length,
                **self.shape,
            },
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        return next_symbol_loss(model, self.text.batch(step)), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        return {VALIDATION_LOSS: text_loss(model, self.text.validation, self.config.length)}


def _encode(text: Corpus, trained: Corpus) -> Tensor:
    """A text in the symbols of the one that is trained on."""
    foreign = sorted(set(text.vocabulary) - set(trained.vocabulary))
    if foreign:
        raise LabError(f"{text.name} has {foreign[0]!r}, which {trained.name} never has")
    number_of = {symbol: number for number, symbol in enumerate(trained.vocabulary)}
    return torch.tensor([number_of[symbol] for symbol in text.vocabulary])[text.tokens]
