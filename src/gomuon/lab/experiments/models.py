"""The two small transformers of the paper; they need only torch.

Both have the same causal trunk: RMSNorm before attention, before the MLP and at the end, four
projection matrices per attention, SwiGLU, rotary positions and no biases. Matrices and embeddings
are drawn from N(0, .02²). The embedding is also the output head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INITIAL_DEVIATION = 0.02
NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0


def rotary_tables(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (length, head_width / 2)."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) of the last axis by the angle of their position."""
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; q, k, v and o are separate matrices."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        q, k = rotate(q, *tables), rotate(k, *tables)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class CausalTransformer(nn.Module):
    """The trunk: vectors (batch, length, width) in, normalised vectors of the same shape out."""

    def __init__(
        self, width: int = 128, layers: int = 3, heads: int = 4, hidden: int = 384
    ) -> None:
        super().__init__()
        for name, value in (
            ("width", width),
            ("layers", layers),
            ("heads", heads),
            ("hidden", hidden),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if width % (2 * heads):
            # Rotary positions rotate pairs, so every head needs an even width.
            raise ValueError(f"width ({width}) must be a multiple of twice the heads ({heads})")
        self.head_width = width // heads
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.final_norm = nn.RMSNorm(width, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        tables = rotary_tables(x.shape[1], self.head_width, x.device)
        for block in self.blocks:
            x = block(x, tables)
        out: Tensor = self.final_norm(x)
        return out


def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every parameter except the norms' weights from N(0, .02²), in order of definition."""
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.RMSNorm)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in gains:
                parameter.normal_(0.0, INITIAL_DEVIATION, generator=generator)


class CharacterModel(nn.Module):
    """Predicts the next symbol at every position; the embedding is also the output head.

    Args:
        vocabulary: number of symbols.
        width, layers, heads, hidden: the trunk's shape; ``hidden`` is the SwiGLU width.
        generator: for the initial parameters; default: torch's global one.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        hidden: int = 384,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.trunk = CausalTransformer(width, layers, heads, hidden)
        initialise(self, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        return F.linear(self.trunk(self.embedding(tokens)), self.embedding.weight)


class ModularAdditionModel(nn.Module):
    """Reads [a, b, CLS] and answers a + b mod p at the CLS position.

    CLS is a separate learned vector, not a row of the embedding with its p rows: the output classes
    are the p numbers only.

    Args:
        modulus: p, the number of classes and of embedding rows.
        width, layers, heads, hidden: the trunk's shape; ``hidden`` is the SwiGLU width.
        generator: for the initial parameters; default: torch's global one.
    """

    def __init__(
        self,
        modulus: int,
        *,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        hidden: int = 192,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(modulus, width)
        self.cls = nn.Parameter(torch.empty(width))
        self.trunk = CausalTransformer(width, layers, heads, hidden)
        initialise(self, generator)

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs (batch, 2) to logits (batch, p)."""
        numbers = self.embedding(pairs)
        cls = self.cls.expand(len(pairs), 1, -1)
        read = self.trunk(torch.cat((numbers, cls), dim=1))[:, -1]
        return F.linear(read, self.embedding.weight)
