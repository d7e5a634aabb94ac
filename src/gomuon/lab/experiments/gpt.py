"""A small GPT as users have it: LayerNorm, biases, learned positions, fused projections, GELU.

Beside a LayerNorm every gradient lacks one rank, so this model shows what a polar factor does in
the null space; the paper's models have RMSNorm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.experiments.models import INITIAL_DEVIATION


class GPTAttention(nn.Module):
    """Self-attention; queries, keys and values come from one matrix."""

    def __init__(self, width: int, heads: int, *, biases: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPTBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual connection."""

    def __init__(
        self, width: int, heads: int, hidden: int, *, biases: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=biases)
        self.attention = GPTAttention(width, heads, biases=biases, causal=causal)
        self.mlp_norm = nn.LayerNorm(width, bias=biases)
        self.up = nn.Linear(width, hidden, bias=biases)
        self.down = nn.Linear(hidden, width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class LayerNormGPT(nn.Module):
    """Predicts the next symbol at every position; the embedding is also the output head.

    Args:
        vocabulary: number of symbols.
        length: the largest number of positions.
        width, layers, heads, hidden: the shape of the blocks.
        biases: whether linear layers and norms have biases.
        scaled_residuals: whether the layers that end in the residual stream start smaller, by
            √(2·layers), as in GPT-2.
        generator: for the initial parameters; default: torch's global one.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        hidden: int = 384,
        biases: bool = True,
        scaled_residuals: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of the heads ({heads})")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            GPTBlock(width, heads, hidden, biases=biases) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width, bias=biases)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, INITIAL_DEVIATION, generator=generator)
            for module in self.modules():
                if isinstance(module, nn.Linear) and biases:
                    module.bias.zero_()
                if isinstance(module, GPTBlock) and scaled_residuals:
                    for last in (module.attention.out, module.down):
                        last.weight.div_(math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.embedding.weight)
