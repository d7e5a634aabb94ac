"""An exception at one operation of a step: the next step must not notice.

After it, whatever of the step has been done, the optimizer must go on exactly as a new one would
that is given the same weights and the same state. All global settings must be as before.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import gomuon
from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import RECIPES
from tests.models import language_loss, train, transformer

CASES = 52_000  # more than all steps have operations, so every one of them has its turn
WARM = (4, 5)  # steps before: then comes a refresh step, or one that reuses
AFTER = 5
Kind = tuple[str, dict[str, Any], int]
METHOD_NAMES = list(dict.fromkeys(name for name, _ in RECIPES))
KINDS: list[Kind] = [(*recipe, warm) for recipe in RECIPES for warm in WARM]


class Stopped(Exception):
    """Raised in place of an operation."""


class Interrupt(TorchDispatchMode):
    """Raises instead of making the operation with this number; counts all of them."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.at:
            raise Stopped(f"{func} as operation {self.at}")
        self.count += 1
        return func(*args, **(kwargs or {}))


def case(seed: int, folder: Path) -> str | None:
    """Every operation of every kind of step in turn."""
    warnings.simplefilter("ignore")
    kind, at = places()[seed % len(places())]
    return interrupted(kind, at)


@cache
def places() -> list[tuple[Kind, int]]:
    """Every kind of step with every operation of it; neighbours are far apart."""
    found = [(number, at) for number in range(len(KINDS)) for at in range(operations(number))]
    return [(KINDS[number], at) for number, at in sorted(found, key=lambda place: place[::-1])]


@cache
def operations(number: int) -> int:
    """How many operations such a step has."""
    _, optimizer = prepared(KINDS[number])
    with Interrupt() as mode:
        optimizer.step()
    return mode.count


def interrupted(kind: Kind, at: int) -> str | None:
    """What is wrong after an exception at that operation; None if nothing is."""
    model, optimizer = prepared(kind)
    before = settings()
    try:
        with Interrupt(at):
            optimizer.step()
    except Stopped:
        pass
    else:
        return f"{kind}: operation {at} was never made"
    if settings() != before:
        return f"{kind}, operation {at}: {before} became {settings()}"
    other, successor = built(kind)
    other.load_state_dict(model.state_dict())
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    later = range(kind[2] + 1, kind[2] + 1 + AFTER)
    train(model, optimizer, later)
    train(other, successor, later)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if not bool(p.isfinite().all()):
            return f"{kind}, operation {at}: {name} is not finite"
        if not torch.equal(p, q):
            distance = float((p - q).norm() / q.norm())
            return f"{kind}, operation {at}: {name} goes on {distance:.1e} apart from a new one"
    return None


def built(kind: Kind) -> tuple[nn.Module, MatrixOptimizer]:
    name, options, _ = kind
    model = transformer(0, torch.float32, width=8, layers=1)
    return model, getattr(gomuon, name)(model, **options)


def prepared(kind: Kind) -> tuple[nn.Module, MatrixOptimizer]:
    """A few steps in, with the next step's gradients."""
    model, optimizer = built(kind)
    with quiet():
        train(model, optimizer, range(kind[2]))
        optimizer.zero_grad()
        language_loss(model, kind[2]).backward()
    return model, optimizer


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def settings() -> dict[str, Any]:
    """What belongs to the process or the thread, not to the optimizer."""
    return {
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "modes": _len_torch_dispatch_stack(),
    }
