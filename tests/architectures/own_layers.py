"""Adapters of peft, and models whose layers are not torch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.architectures.case import Use, Uses, layer_of, package
from tests.architectures.decoders import SYMBOLS, llama
from tests.architectures.plain import WIDTH

# ---- adapters ------------------------------------------------------------------------------------


def adapted(**settings: Any) -> nn.Module:
    """A Llama with adapters in its attention. B does not start at zero, or A had no gradient."""
    peft = package("peft")
    targets = ["q_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM",
                             init_lora_weights=False, **settings)  # fmt: skip
    model: nn.Module = peft.get_peft_model(llama(), config)
    return model


def lora() -> nn.Module:
    return adapted(lora_dropout=0.1)


def dora() -> nn.Module:
    return adapted(use_dora=True)


# ---- layers of one's own -------------------------------------------------------------------------

Layer = Callable[[int, int], nn.Module]


class LanguageModel(nn.Module):
    """Blocks of attention and an MLP, between an embedding and a head of torch."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(F.rms_norm(x, x.shape[-1:]))
        return logits


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with four heads."""
    q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class OutputsFirst(nn.Module):
    """A linear layer with its weight as torch stores it."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(m, n) / n**0.5)
        self.bias = nn.Parameter(torch.zeros(m))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class InputsFirst(nn.Module):
    """A linear layer with its weight as Flax stores it."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(n, m) / n**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,io->...o", x, self.kernel)


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = OutputsFirst(WIDTH, 3 * WIDTH), OutputsFirst(WIDTH, WIDTH)
        self.up, self.down = InputsFirst(WIDTH, 48), InputsFirst(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(*self.qkv(normed(x)).chunk(3, -1)))
        hidden: Tensor = x + self.down(F.gelu(self.up(normed(x))))
        return hidden


def own_layers() -> nn.Module:
    return LanguageModel(OwnBlock)


def own_as_layers(model: nn.Module) -> Uses:
    uses: Uses = {}
    for prefix, module in list(model.named_modules()):
        parent, _, own = prefix.rpartition(".")
        if isinstance(module, OutputsFirst):
            layer, leaf = layer_of(module.weight, module.bias), "weight"
        elif isinstance(module, InputsFirst):
            layer, leaf = layer_of(module.kernel.mT), "kernel"
        else:
            continue
        setattr(model.get_submodule(parent), own, layer)
        uses[f"{prefix}.{leaf}"] = [Use(layer)]
    return uses


class BareBlock(nn.Module):
    """Its weights are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        d, h = WIDTH, 48
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (h, d), "down": (d, h)}
        for name, (m, n) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(m, n) / n**0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = normed(x)
        q, k, v = (F.linear(y, self.get_parameter(name)) for name in "qkv")
        x = x + F.linear(attend(q, k, v), self.get_parameter("o"))
        hidden = F.gelu(F.linear(normed(x), self.get_parameter("up")))
        return x + F.linear(hidden, self.get_parameter("down"))


def bare_parameters() -> nn.Module:
    return LanguageModel(BareBlock)


class StackedBlock(nn.Module):
    """Queries, keys and values in one parameter 3×d×d, as in modded-nanogpt."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv_w.flatten(end_dim=1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(*self.project(normed(x)).chunk(3, -1)))
        hidden: Tensor = x + self.mlp(normed(x))
        return hidden


def stacked_qkv() -> nn.Module:
    return LanguageModel(StackedBlock)


def stacked_as_layers(model: nn.Module) -> Uses:
    uses: Uses = {}
    for prefix, block in model.named_modules():
        if isinstance(block, StackedBlock):
            three = [layer_of(one) for one in block.qkv_w]
            block.__dict__["project"] = lambda x, three=three: torch.cat(
                [layer(x) for layer in three], -1
            )
            uses[f"{prefix}.qkv_w"] = [Use(layer, matrix=i) for i, layer in enumerate(three)]
    return uses
