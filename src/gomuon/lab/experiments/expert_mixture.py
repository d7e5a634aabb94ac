"""A mixture of experts on Tiny Shakespeare: two of eight small MLPs for each character.

The experts of a layer are two stacks of matrices, so gomuon trains each expert as a matrix of its
own. On one update an expert sees few characters, or none, and which ones changes all the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.data import corpora
from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.held_out_text import SplitText, next_symbol_loss, text_loss
from gomuon.lab.experiments.models import (
    NORM_EPSILON,
    Attention,
    initialise,
    rotary_tables,
)
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig

EXPERTS, CHOSEN = 8, 2
BALANCE = 0.01  # weight of the balancing loss, as in Switch Transformers (arXiv 2101.03961)


class Experts(nn.Module):
    """Small MLPs, their weights stacked as experts × outputs × inputs."""

    is_transposed = False  # tells gomuon how the stacks are stored

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, hidden, width))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, width, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Rows [n, width], the experts of each row [n, k] and their weights [n, k]."""
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            if not len(row):
                continue
            hidden = F.gelu(F.linear(x[row], self.up_proj[expert]))
            answer = F.linear(hidden, self.down_proj[expert])
            out = out.index_add(0, row, weights[row, place].unsqueeze(1) * answer)
        return out


class ExpertLayer(nn.Module):
    """A router and its experts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' answers, and how unevenly the experts are used: 1 if all are used alike."""
        rows = x.flatten(0, -2)
        shares = self.router(rows).softmax(-1)
        weights, chosen = shares.topk(CHOSEN)
        used = F.one_hot(chosen, EXPERTS).sum(1).to(x.dtype).mean(0) / CHOSEN
        imbalance = EXPERTS * (used * shares.mean(0)).sum()
        weights = weights / weights.sum(-1, keepdim=True)
        out: Tensor = self.experts(rows, chosen, weights)
        return out.view_as(x), imbalance


class ExpertBlock(nn.Module):
    """Attention and a mixture of experts, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.attention = Attention(width, heads)
        self.mixture_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.mixture = ExpertLayer(width, hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), tables)
        answer, imbalance = self.mixture(self.mixture_norm(x))
        return x + answer, imbalance


class MixtureModel(nn.Module):
    """A character model of such blocks; the embedding is also the output head."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width ({width}) must be a multiple of twice the heads ({heads})")
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, heads, hidden) for _ in range(layers))
        self.final_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.head_width = width // heads
        initialise(self, generator)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, length, vocabulary), and the mean imbalance of the layers."""
        x = self.embedding(tokens)
        tables = rotary_tables(tokens.shape[1], self.head_width, x.device)
        found = []
        for block in self.blocks:
            x, imbalance = block(x, tables)
            found.append(imbalance)
        return F.linear(self.final_norm(x), self.embedding.weight), torch.stack(found).mean()


class ExpertMixtureTask:
    """Next-character prediction; the last tenth of the text is held out.

    The loss that is trained has the balancing loss in it, and the validation loss does not.
    """

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.text = SplitText(corpora.load("shakespeare", data_dir), config, data_dir)
        shape = ("width", "layers", "heads", "hidden")
        self.shape: dict[str, Any] = {part: getattr(config, part) for part in shape}

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(self.config.seed)
        return MixtureModel(self.text.vocabulary, **self.shape, generator=generator)

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        facts = {"experts": EXPERTS, "chosen": CHOSEN, "balance": BALANCE, **self.shape}
        return {
            "stream": self.text.offsets,
            "corpus": self.text.sha256,
            "model": {"kind": "experts", "vocabulary": self.text.vocabulary, **facts},
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        windows = self.text.batch(step)
        logits, imbalance = model(windows[:, :-1])
        predicted = next_symbol_loss(lambda _: logits, windows)
        return predicted + BALANCE * imbalance, {"imbalance": imbalance.item()}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        found = text_loss(lambda x: model(x)[0], self.text.validation, self.config.length)
        return {VALIDATION_LOSS: found}
