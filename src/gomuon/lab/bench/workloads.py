"""The models that are trained, with random batches, so that nothing is downloaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.bench.other_packages import load
from gomuon.lab.errors import unknown_name
from gomuon.lab.experiments.models import CharacterModel

Size = Literal["full", "quick", "tiny"]
Batch = tuple[Tensor, Tensor]
SEED = 17
BATCHES = 4  # used in turn; the time of a step does not depend on their content


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        name: on the command line.
        title: in tables.
        make: creates the model, the same one at every call.
        batches: its inputs and targets, used in turn.
        loss: of a model and a batch.
        shape: its sizes, for the record.
        cycles: default number of measured windows of sixteen steps.
        peak: whether to measure peak memory, which takes one more refresh cycle of every arm.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    batches: tuple[Batch, ...]
    loss: Callable[[nn.Module, Batch], Tensor]
    shape: Mapping[str, int]
    cycles: int = 1
    peak: bool = True


class Link(nn.Module):
    """One square layer of a chain; residual, so that signals survive hundreds of layers."""

    def __init__(self, side: int, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(side, side, bias=False)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        if self.residual:
            return x + self.linear(F.rms_norm(x, x.shape[-1:]))
        return F.relu(self.linear(x))


class Chain(nn.Module):
    """Equal square layers in numbered blocks, so that routing takes none of them for a head."""

    def __init__(self, side: int, layers: int, residual: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Link(side, residual) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class ConvNet(nn.Module):
    """Four 3×3 convolutions with stride 2 after the first, and a linear head."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__()
        widths = (3, channels, 2 * channels, 4 * channels, 4 * channels)
        parts: list[nn.Module] = []
        for i, (n, m) in enumerate(itertools.pairwise(widths)):
            conv = nn.Conv2d(n, m, 3, stride=2 if i else 1, padding=1, bias=False)
            parts += [conv, nn.BatchNorm2d(m), nn.ReLU()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(images).mean((-2, -1)))
        return out


def language(
    name: str,
    title: str,
    make: Callable[[], nn.Module],
    shape: Mapping[str, int],
    **options: Any,
) -> Workload:
    """Next-token prediction on random tokens."""
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, shape["batch"], shape["length"] + 1)
    tokens = torch.randint(0, shape["vocabulary"], size, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch[0])
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    batches = tuple((window[:, :-1], window[:, 1:]) for window in tokens)
    return Workload(name, title, seeded(make), batches, loss, shape, **options)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Make `make` return the same model at every call, whatever random numbers were drawn."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return make()

    return made


def transformer(name: str, title: str, shape: Mapping[str, int], **options: Any) -> Workload:
    """The paper's architecture."""

    def make() -> nn.Module:
        return CharacterModel(
            shape["vocabulary"],
            width=shape["width"],
            layers=shape["layers"],
            heads=shape["heads"],
            hidden=shape["hidden"],
        )

    return language(name, title, make, shape, **options)


def gpt2(name: str, title: str, shape: Mapping[str, int]) -> Workload:
    """GPT-2 of transformers with random weights: fused projections, stored transposed."""

    def make() -> nn.Module:
        transformers = load("transformers")
        config = transformers.GPT2Config(
            vocab_size=shape["vocabulary"],
            n_positions=shape["length"],
            n_embd=shape["width"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    return language(name, title, make, shape)


def chain(
    name: str, title: str, shape: Mapping[str, int], residual: bool, **options: Any
) -> Workload:
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, 2, shape["batch"], shape["width"])
    rows = torch.randn(size, generator=generator)
    return Workload(
        name,
        title,
        seeded(lambda: Chain(shape["width"], shape["layers"], residual)),
        tuple((x, y) for x, y in rows),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        shape,
        **options,
    )


def conv(name: str, title: str, shape: Mapping[str, int]) -> Workload:
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, shape["batch"], 3, shape["side"], shape["side"])
    images = torch.randn(size, generator=generator)
    labels = torch.randint(0, 10, (BATCHES, shape["batch"]), generator=generator)
    return Workload(
        name,
        title,
        seeded(lambda: ConvNet(shape["channels"])),
        tuple(zip(images, labels, strict=True)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        shape,
    )


KEYS = ("width", "layers", "heads", "hidden", "channels", "side", "vocabulary", "batch", "length")


def _shape(keys: str) -> Callable[..., dict[str, int]]:
    return lambda *sizes: dict(zip(keys.split(), sizes, strict=True))


_text = _shape("width layers heads hidden vocabulary batch length")
_gpt2 = _shape("width layers heads vocabulary batch length")
_rows = _shape("width layers batch")
_images = _shape("channels side batch")

# Sizes of the full benchmark, of a quick one (a minute), and of tests.
SHAPES: dict[str, dict[Size, dict[str, int]]] = {
    "paper": {
        "full": _text(128, 3, 4, 384, 50, 16, 128),
        "quick": _text(64, 1, 4, 192, 50, 4, 64),
        "tiny": _text(16, 1, 2, 24, 20, 4, 16),
    },
    "wide": {
        "full": _text(512, 4, 8, 1536, 50, 4, 128),
        "quick": _text(96, 1, 4, 192, 50, 2, 64),
        "tiny": _text(16, 2, 2, 24, 20, 2, 16),
    },
    "mlp": {"full": _rows(512, 4, 1024), "quick": _rows(96, 2, 192), "tiny": _rows(12, 2, 24)},
    "gpt2": {
        "full": _gpt2(256, 4, 4, 512, 8, 128),
        "quick": _gpt2(64, 1, 4, 512, 2, 64),
        "tiny": _gpt2(16, 1, 2, 20, 4, 16),
    },
    "conv": {"full": _images(32, 32, 64), "quick": _images(4, 32, 16), "tiny": _images(2, 8, 4)},
    "overhead": {"full": _rows(8, 200, 64), "quick": _rows(8, 50, 64), "tiny": _rows(4, 5, 16)},
}
NAMES = tuple(SHAPES)


def find(name: str, size: Size) -> Workload:
    """The workload of that name.

    Raises:
        LabError: the name is unknown; the message suggests the nearest one.
    """
    if name not in SHAPES:
        raise unknown_name("model", name, NAMES)
    shape = SHAPES[name][size]
    wide, layers, full = shape.get("width"), shape.get("layers"), size == "full"
    match name:
        case "paper":
            return transformer(name, "the paper's model", shape, cycles=2 if full else 1)
        case "wide":
            title = f"the paper's architecture at width {wide}, layers: {layers}"
            return transformer(name, title, shape, peak=not full)
        case "gpt2":
            return gpt2(name, f"GPT-2 of width {wide}, layers: {layers}", shape)
        case "conv":
            return conv(name, "a convolutional net", shape)
        case "mlp":
            return chain(name, f"an MLP of {layers} layers {wide}×{wide}", shape, residual=False)
    title = f"{layers} matrices {wide}×{wide}"
    return chain(name, title, shape, residual=True, cycles=4 if full else 1)
