"""What an architecture is trained on, and what is expected of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon.parameters.routing import Route

Loss = Callable[[Any], Tensor]
# Expected of a parameter: "matrix" is one with captured factors, "identity" one without.
LABELS = ("frozen", "identity", "missed", "embedding", "head", "other", "matrix", "vector")


@dataclass(frozen=True)
class Use:
    """A linear layer or convolution of a reference, and what it stands for.

    Attributes:
        module: the layer.
        matrix: which matrix of a stack it is.
        begin: the first of the outputs that it computes.
        outputs: the number of outputs of the whole weight, if these are not all.
    """

    module: nn.Module
    matrix: int = 0
    begin: int = 0
    outputs: int | None = None


Uses = dict[str, list[Use]]  # by the name of the weight


@dataclass(frozen=True)
class Case:
    """An architecture.

    Attributes:
        make: the model.
        loss: its loss on the one fixed batch.
        share: how many per cent of its weights without embeddings are matrices.
        matrix: patterns of matrices whose factors are captured.
        identity: of matrices that nothing can be captured of.
        missed: of matrices whose layers turn out not to be called, of which a warning tells.
        embedding: of embeddings.
        head: of output heads.
        other: of other weights with several dimensions that AdamW updates.
        frozen: of what is not trained.
        settings: of the optimizer.
        by_function: patterns of weights that `F.linear` multiplies with, without their module.
        as_layers: changes a copy of the model so that linear layers compute what functions do, and
            returns these layers by the names of the weights they stand for.
        parts: submodules with an optimizer and a loss of their own, trained in turn.
        dtype: of the model.
        says: the warning that is expected.
    """

    make: Callable[[], nn.Module]
    loss: Loss
    share: int
    matrix: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    embedding: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_function: tuple[str, ...] = ()
    as_layers: Callable[[Any], Uses] | None = None
    parts: Mapping[str, Loss] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    says: str | None = None

    def build(self) -> nn.Module:
        """The model, the same each time."""
        torch.manual_seed(0)
        return self.make().to(self.dtype).train()

    def losses(self) -> Mapping[str, Loss]:
        """The losses by the part that is updated with them; "" is the whole model."""
        return self.parts or {"": self.loss}

    def expected(self, name: str) -> str:
        """The label of a parameter; a vector, if no pattern has its name."""
        for label in LABELS[:-1]:
            if any(fnmatchcase(name, pattern) for pattern in getattr(self, label)):
                return label
        return "vector"

    def patterns(self) -> Iterator[str]:
        """All patterns of parameters."""
        for label in LABELS[:-1]:
            yield from getattr(self, label)


def label_of(route: Route) -> str:
    """What a parameter is in a routing table."""
    if route.is_frozen:
        return "frozen"
    if route.treatment == "matrix":
        return "identity" if route.geometry.startswith("identity") else "matrix"
    return route.kind


def package(name: str) -> Any:
    """An optional package. Missing is a reason to skip, broken is not."""
    why = "in the test extra: pip install '.[test]'"
    return pytest.importorskip(name, reason=why, exc_type=ModuleNotFoundError)


def fixed(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(side: int = 16, channels: int = 3, batch: int = 4) -> Tensor:
    return fixed(batch, channels, side, side)


def like(model: nn.Module, v: Tensor) -> Tensor:
    """v in the dtype of a model."""
    return v.to(next(model.parameters()).dtype)


def layer_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight.detach().clone()
    if bias is not None:
        layer.bias.data = bias.detach().clone()
    return layer
