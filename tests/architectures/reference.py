"""Factors computed directly, from inputs and output gradients that hooks of torch record."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.architectures.case import Case, Loss, Use, Uses

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


@dataclass
class Sums:
    """Σ x xᵀ, Σ δ δᵀ and the number of rows, for each matrix of a weight that was used."""

    A: dict[int, Tensor] = field(default_factory=dict)
    B: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    def add(self, matrix: int, x: Tensor, delta: Tensor) -> None:
        """Add rows x [N, n] and δ [N, m]."""
        self.A[matrix] = self.A.get(matrix, 0) + x.T @ x
        self.B[matrix] = self.B.get(matrix, 0) + delta.T @ delta
        self.rows[matrix] = self.rows.get(matrix, 0) + len(x)


class Recorder:
    """Records the rows of layers that a backward pass reaches."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    def watch(self, name: str, use: Use) -> None:
        """Hook a layer that stands for a weight of this name."""

        def hook(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
            return self.record(name, use, args[0], y)

        use.module.register_forward_hook(hook)

    def record(self, name: str, use: Use, x: Tensor, y: Tensor) -> Tensor:
        """Add x and the gradient of y, once this arrives; returns y."""
        x = x.detach().clone()  # some models write into it later

        def receive(g: Tensor) -> None:
            for group, (rows, deltas) in enumerate(_rows(use.module, x, g)):
                missing = (use.outputs or deltas.shape[1]) - use.begin - deltas.shape[1]
                whole = F.pad(deltas, (use.begin, missing))
                self.sums.setdefault(name, Sums()).add(use.matrix + group, rows, whole)

        if y.requires_grad:
            y.register_hook(receive)
        return y.clone()  # an activation that writes into y would take the hook away

    @contextmanager
    def functions(self, weights: dict[Tensor, str]) -> Iterator[None]:
        """Record what `F.linear` does with these weights."""
        plain = F.linear

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = plain(x, weight, bias)
            if weight in weights:
                return self.record(weights[weight], Use(nn.Identity()), x, y)
            return y

        with mock.patch.object(F, "linear", linear):
            yield


def direct_sums(case: Case, model: Any, loss: Loss) -> dict[str, Sums]:
    """The sums of one forward and backward pass, by the name of the weight. Changes the model."""
    names = {weight: name for name, weight in model.named_parameters()}
    functional = {
        weight: name
        for weight, name in names.items()
        if any(fnmatchcase(name, pattern) for pattern in case.by_function)
    }
    uses: Uses = {}
    for module in model.modules():
        weight = module._parameters.get("weight")  # a spectral norm counts how often it is read
        if _is_layer(module) and weight in names and weight not in functional:
            uses.setdefault(names[weight], []).append(Use(module))
    if case.as_layers is not None:
        uses |= case.as_layers(model)
    recorder = Recorder()
    for name, own in uses.items():
        for use in own:
            recorder.watch(name, use)
    with recorder.functions(functional):
        loss(model).backward()
    return recorder.sums


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a linear layer, also Transformers' with its weight turned, or a convolution."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or type(module).__name__ == "Conv1D"


def _rows(module: nn.Module, x: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows x and δ of each group of a layer."""
    if not isinstance(module, CONVOLUTIONS):
        return [(x.flatten(0, -2), g.flatten(0, -2))]
    if isinstance(module, nn.Conv1d):
        x, g = x.unsqueeze(2), g.unsqueeze(2)
    sizes: dict[str, Any] = {
        key: (low, *getattr(module, key)) if isinstance(module, nn.Conv1d) else getattr(module, key)
        for key, low in (("kernel_size", 1), ("dilation", 1), ("padding", 0), ("stride", 1))
    }
    patches = F.unfold(x, **sizes).mT.flatten(0, 1)
    deltas = g.flatten(2).mT.flatten(0, 1)
    both = zip(patches.chunk(module.groups, 1), deltas.chunk(module.groups, 1), strict=True)
    return list(both)


def stacked(found: dict[int, Tensor], like: Tensor) -> Tensor:
    """Sums of each matrix, [matrices, …] as `like`; zeros for one that was not used."""
    return torch.stack([found.get(e, torch.zeros_like(one)) for e, one in enumerate(like)])
