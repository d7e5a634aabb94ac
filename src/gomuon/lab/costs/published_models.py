"""Published transformers by name, for cost estimates on the meta device.

They have the shapes of the published matrices, but no weights; they are not meant to be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.costs.tensor_plan import TensorPlan
from gomuon.lab.experiments.models import (
    NORM_EPSILON,
    CharacterModel,
    SwiGLU,
    rotary_tables,
    rotate,
)


class FusedAttention(nn.Module):
    """Attention of GPT-2: queries, keys and values come from one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return out


class GPT2Block(nn.Module):
    """Attention and an MLP of four times the width, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))
        return out


class GPT2(nn.Module):
    """Learned positions, biases, and an embedding that is also the output head."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.h = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class GroupedAttention(nn.Module):
    """Attention of Llama: rotary positions; groups of query heads share keys and values."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        q, k = rotate(q, *tables), rotate(k, *tables)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.self_attn = GroupedAttention(width, heads, key_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_norm(x), tables)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """No biases; embedding and output head are separate."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, key_heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            LlamaBlock(width, heads, key_heads, hidden) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        tables = rotary_tables(tokens.shape[1], self.size, tokens.device)
        for block in self.layers:
            x = block(x, tables)
        out: Tensor = self.lm_head(self.norm(x))
        return out


@dataclass(frozen=True)
class Configuration:
    """A model by name.

    Attributes:
        build: how it is built.
        context: the length of a sequence.
        tokens: of one rank and step.
        description: its name in words.
        division: how tensor parallelism usually divides it; None if the model cannot be divided.
    """

    build: Callable[[], nn.Module]
    context: int
    tokens: int
    description: str
    division: TensorPlan | None = None


def llama_division(heads: int) -> TensorPlan:
    """The usual plan of a Llama with so many heads of keys."""
    return TensorPlan(
        ("*.q_proj", "*.k_proj", "*.v_proj", "*.gate", "*.up", "lm_head"),
        ("*.o_proj", "*.down", "embed_tokens"),
        heads,
    )


def gpt2_division(heads: int) -> TensorPlan:
    """The usual plan of a GPT-2; its embedding is also the output head, and stays whole."""
    return TensorPlan(("*.c_attn", "*.c_fc"), ("*.c_proj",), heads)


CONFIGURATIONS: dict[str, Configuration] = {
    "character": Configuration(
        lambda: CharacterModel(65), 128, 16 * 128, "the paper's character model"
    ),
    "gpt2-124m": Configuration(
        lambda: GPT2(768, 12, 12), 1024, 32 * 1024, "GPT-2", gpt2_division(12)
    ),
    "gpt2-medium": Configuration(
        lambda: GPT2(1024, 24, 16), 1024, 32 * 1024, "GPT-2 medium", gpt2_division(16)
    ),
    "gpt2-xl": Configuration(
        lambda: GPT2(1600, 48, 25), 1024, 16 * 1024, "GPT-2 XL", gpt2_division(25)
    ),
    "llama-7b": Configuration(
        lambda: Llama(32000, 4096, 32, 32, 32, 11008),
        4096,
        4 * 4096,
        "Llama 2 7B",
        llama_division(32),
    ),
    "llama-8b": Configuration(
        lambda: Llama(128256, 4096, 32, 32, 8, 14336),
        8192,
        2 * 8192,
        "Llama 3 8B",
        llama_division(8),
    ),
    "llama-70b": Configuration(
        lambda: Llama(32000, 8192, 80, 64, 8, 28672),
        4096,
        2 * 4096,
        "Llama 2 70B",
        llama_division(8),
    ),
}
