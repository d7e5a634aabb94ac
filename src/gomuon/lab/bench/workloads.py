"""The models that are trained, with random batches, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.bench.networks import Chain, ConvNet, ResNet18
from gomuon.lab.bench.other_packages import load
from gomuon.lab.errors import unknown_name
from gomuon.lab.experiments.models import CharacterModel

Size = Literal["full", "quick", "tiny"]
Batch = tuple[Tensor, Tensor]
SEED = 17
WINDOW = 16  # steps: a whole cycle of arms that refresh every 16 steps
LONGEST = 64  # steps: of arms that refresh less often, no whole cycle is measured
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
        cycles: default number of measured windows.
        window: steps in a window.
        peak: whether to measure peak memory, which takes one more refresh cycle of every arm.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    batches: tuple[Batch, ...]
    loss: Callable[[nn.Module, Batch], Tensor]
    shape: Mapping[str, int]
    cycles: int = 1
    window: int = WINDOW
    peak: bool = True


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


def images(
    name: str,
    title: str,
    make: Callable[[], nn.Module],
    shape: Mapping[str, int],
    **options: Any,
) -> Workload:
    """Classification of random images."""
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, shape["batch"], 3, shape["side"], shape["side"])
    pictures = torch.randn(size, generator=generator)
    classes = shape.get("classes", 10)
    labels = torch.randint(0, classes, (BATCHES, shape["batch"]), generator=generator)
    return Workload(
        name,
        title,
        seeded(make),
        tuple(zip(pictures, labels, strict=True)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        shape,
        **options,
    )


KEYS = (
    *("width", "layers", "heads", "hidden", "channels", "side", "classes", "vocabulary"),
    *("batch", "length"),
)


def _shape(keys: str) -> Callable[..., dict[str, int]]:
    return lambda *sizes: dict(zip(keys.split(), sizes, strict=True))


_text = _shape("width layers heads hidden vocabulary batch length")
_gpt2 = _shape("width layers heads vocabulary batch length")
_rows = _shape("width layers batch")
_images = _shape("channels side batch")
_photographs = _shape("channels side classes batch")

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
    "resnet": {
        "full": _photographs(64, 32, 1000, 32),
        "quick": _photographs(8, 32, 10, 8),
        "tiny": _photographs(2, 32, 10, 4),
    },
    "mlp-2048": {
        "full": _rows(2048, 4, 1024),
        "quick": _rows(128, 2, 128),
        "tiny": _rows(16, 2, 24),
    },
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
            return transformer(name, "the paper's model", shape, cycles=4 if full else 1)
        case "wide":
            title = f"the paper's architecture at width {wide}, layers: {layers}"
            return transformer(name, title, shape, peak=not full)
        case "gpt2":
            return gpt2(name, f"GPT-2 of width {wide}, layers: {layers}", shape)
        case "conv":
            make: Callable[[], nn.Module] = partial(ConvNet, shape["channels"])
            return images(name, "a convolutional net", make, shape)
        case "resnet":
            make = partial(ResNet18, shape["classes"], shape["channels"])
            return images(name, "ResNet-18", make, shape)
        case "mlp-2048":
            title = f"an MLP of {layers} layers {wide}×{wide}"
            # Two cycles of K = 4: one step takes seconds.
            fewer = {"window": 8, "peak": False} if full else {}
            return chain(name, title, shape, residual=False, **fewer)
        case "mlp":
            return chain(name, f"an MLP of {layers} layers {wide}×{wide}", shape, residual=False)
    title = f"{layers} matrices {wide}×{wide}"
    return chain(name, title, shape, residual=True, cycles=4 if full else 1)
