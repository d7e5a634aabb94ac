"""The model of a cost estimate, on the meta device, and what one forward pass found in it."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gomuon.lab.costs.input_uses import InputUse, run_forward
from gomuon.lab.costs.matrix_layers import part_of
from gomuon.lab.costs.published_models import CONFIGURATIONS
from gomuon.lab.costs.tensor_plan import (
    TensorPlan,
    divided_flops,
    divided_layers,
    place_parameters,
)
from gomuon.lab.errors import LabError, unknown_name
from gomuon.parameters.layout import Layout
from gomuon.parameters.routing import Routes
from gomuon.parameters.tensor_shards import TensorShard

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
        routes: the treatment of parameters, as the optimizer's `routes`.
        places: of all parameters in tensor parallelism; empty without it.
        own_flops: of a step's forward passes of one rank by module, without those of the modules in
            it; None without a forward pass.
    """

    name: str
    model: nn.Module
    tokens: int
    passes: float
    uses: dict[Tensor, InputUse] | None
    model_flops: float
    routes: Routes = None
    places: Mapping[Tensor, TensorShard] = field(default_factory=dict)
    own_flops: Mapping[str, float] | None = None

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def held_parameters(self) -> int:
        """Those of one rank before `fully_shard` divides them."""
        parts = (part_of(parameter, self.layout()) for parameter in self.model.parameters())
        return sum(part.rows * part.width for part in parts)

    def layout(self, exact: bool = False) -> Layout:
        """How tensor parallelism divides the parameters; if it is `exact`, owners gather them."""
        return Layout(shards=dict(self.places), gathers=exact)

    def divided(self, plan: TensorPlan, parts: int) -> PlannedModel:
        """The model as so many ranks divide it.

        Raises:
            LabError: they cannot divide it in this way.
        """
        layers = divided_layers(self.name, self.model, plan)
        divided = replace(self, places=place_parameters(self.name, self.model, plan, parts))
        if self.uses is None or self.own_flops is None:
            flops = 6.0 * divided.held_parameters * self.tokens
            return replace(divided, model_flops=flops)
        uses = dict(self.uses)
        for layer in () if plan.shares_inputs else layers:
            weight = self.model.get_submodule(layer).get_parameter("weight")
            if weight in uses:  # a tensor of its own, made of what others read as well
                uses[weight] = replace(uses[weight], what=("alone", layer))
        flops = 3.0 * divided_flops(self.own_flops, layers, parts)
        return replace(divided, uses=uses, model_flops=flops)


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
            found = run_forward(model, x)
    except Exception as error:  # the user's code may raise anything
        shown = ",".join(map(str, sizes))
        raise LabError(
            f"{name!r} fails on an input of {dtype} {shown} on the meta device: {error}; give its "
            "shape with --input, or leave --input out to estimate without shared inputs"
        ) from error
    passes = tokens / _tokens_in(sizes, symbols)
    own = {part: flops * passes for part, flops in _own_flops(counter, found.uncounted).items()}
    # The backward pass has two products for every product of the forward pass.
    flops = 3.0 * (counter.get_total_flops() + sum(found.uncounted.values())) * passes
    return PlannedModel(name, model, tokens, passes, found.uses, flops, own_flops=own)


def _own_flops(counter: FlopCounterMode, uncounted: Mapping[str, int]) -> dict[str, float]:
    """FLOPs by module, without those of the modules in it.

    `uncounted` are those of modules that did not run.
    """
    counted = {
        name.partition(".")[2]: float(sum(flops.values()))
        for name, flops in counter.get_flop_counts().items()
        if name != "Global"
    }
    own = dict(counted)
    for name, flops in counted.items():
        around = name
        while around:
            around = around.rpartition(".")[0]
            if around in counted:
                own[around] -= flops
                break
    for name, flops in uncounted.items():
        own[name] = own.get(name, 0.0) + flops
    return own


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
