"""The model of a cost estimate, on the meta device, and what one forward pass found in it."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gomuon.lab.costs.matrix_layers import InputUse, find_input_uses
from gomuon.lab.costs.published_models import CONFIGURATIONS
from gomuon.lab.errors import LabError, unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float64": torch.float64}  # fmt: skip
TOKENS = 16 * 1024  # per rank and step, for a user's own model


@dataclass(frozen=True)
class PlannedModel:
    """A model, the inputs of its layers, and its FLOPs.

    Attributes:
        tokens: of one step of one rank.
        passes: tokens of a step divided by those of the forward pass that gave `uses`.
        uses: what each layer reads. None without a forward pass: then no two layers share an
            input, each is used once per token, and `model_flops` is 6·parameters·tokens.
        model_flops: of forward and backward of one step of one rank.
    """

    name: str
    model: nn.Module
    tokens: int
    passes: float
    uses: dict[Tensor, InputUse] | None
    model_flops: float

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def published_model(name: str, tokens: int | None, dtype: str) -> PlannedModel:
    """A model of `published_models`, by name."""
    if name not in CONFIGURATIONS:
        raise unknown_name("model", name, CONFIGURATIONS)
    configuration = CONFIGURATIONS[name]
    model = _built(configuration.build, name, dtype)
    return _observed(name, model, (1, configuration.context), tokens or configuration.tokens)


def users_model(path: str, shape: str, tokens: int | None, dtype: str) -> PlannedModel:
    """A model returned by the user's function, given as package.module:function."""
    module, colon, function = path.partition(":")
    if not (module and colon and function):
        raise LabError(f"--model {path!r} is not understood; write package.module:function")
    sys.path.insert(0, str(Path.cwd()))  # as python -m does
    try:
        build = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise LabError(f"--model {path!r} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    model = _built(build, path, dtype)
    if shape:
        return _observed(path, model, _sizes(shape), tokens or TOKENS)
    tokens = tokens or TOKENS
    flops = 6.0 * sum(p.numel() for p in model.parameters()) * tokens
    return PlannedModel(path, model, tokens, tokens, None, flops)


def _built(build: Callable[[], Any], name: str, dtype: str) -> nn.Module:
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # the user's code may raise anything
        raise LabError(f"{name!r} cannot be built on the meta device: {error}") from error
    if not isinstance(model, nn.Module):
        raise LabError(f"{name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    if next(model.parameters(), None) is None:
        raise LabError(
            f"{name!r} returned a {type(model).__name__} without parameters; give another model"
        )
    return model.to("meta").to(DTYPES[dtype])


def _observed(name: str, model: nn.Module, sizes: tuple[int, ...], tokens: int) -> PlannedModel:
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()  # a batch of one example has no variance, and costs are the same
    symbols = any(isinstance(part, nn.Embedding) for part in model.modules())
    dtype = torch.long if symbols else next(model.parameters()).dtype
    counter = FlopCounterMode(display=False)
    try:
        x = torch.zeros(sizes, dtype=dtype, device="meta")
        with counter:
            uses = find_input_uses(model, x)
    except Exception as error:  # the user's code may raise anything
        shown = ",".join(map(str, sizes))
        raise LabError(
            f"{name!r} fails on an input of {dtype} {shown} on the meta device: {error}; give its "
            "shape with --input, or leave --input out to estimate without shared inputs"
        ) from error
    passes = tokens / _tokens_in(sizes, symbols)
    # The backward pass has two products for every product of the forward pass.
    return PlannedModel(name, model, tokens, passes, uses, 3.0 * counter.get_total_flops() * passes)


def _tokens_in(sizes: tuple[int, ...], symbols: bool) -> int:
    """Symbols or vectors in an input; an image (four dimensions) counts as one."""
    if symbols:
        return math.prod(sizes)
    return math.prod(sizes[:-1]) if len(sizes) < 4 else sizes[0]


def _sizes(shape: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in shape.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise LabError(f"--input {shape!r} is not understood; write a shape such as 1,1024")
    return sizes
