"""Optimizers from outside the package: any class of torch's kind.

A class gets the model, named parameters or parameters, by the name of its first argument. One that
refuses what is no matrix gets the matrices, and AdamW the rest.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import own_code
from gomuon.lab.experiments.foreign import (
    AnyOptimizer,
    CombinedOptimizer,
    adamw,
    leave_uncompiled,
    matrices_and_rest,
)

MODEL = ("model", "module", "net", "network")
NAMED = ("named_parameters", "named_params")
# Which parameters a class gets; the option of that name chooses, otherwise the first it accepts.
SHARE = "parameters"
SHARES = ("all", "matrices", "2d")
NOTES = {
    "matrices": "gets the matrices, and AdamW the other parameters",
    "2d": "gets the matrices of two dimensions, and AdamW the other parameters",
}
# Settings that say how many steps a class's geometry lasts, in packages that we know.
INTERVALS = ("refresh_every", "precondition_frequency", "preconditioning_compute_steps")


@dataclass(frozen=True)
class OwnOptimizer:
    """A class from outside, and what its signature says."""

    name: str
    kind: type[torch.optim.Optimizer]
    signature: inspect.Signature

    @property
    def takes(self) -> str:
        """What its first argument is: "model", "named parameters" or "parameters"."""
        first = next(iter(self.signature.parameters.values()), None)
        if first is None:
            return "parameters"
        annotated = first.annotation if isinstance(first.annotation, type) else None
        if first.name in MODEL or (annotated is not None and issubclass(annotated, nn.Module)):
            return "model"
        return "named parameters" if first.name in NAMED else "parameters"

    @property
    def has_momentum(self) -> bool:
        return "momentum" in self.signature.parameters

    @property
    def default_rate(self) -> float | None:
        """The class's own; None if it has none that is a positive number."""
        rate = self.signature.parameters.get("lr")
        value = None if rate is None else rate.default
        return float(value) if isinstance(value, int | float) and value > 0 else None

    def interval(self, options: Mapping[str, Any]) -> int:
        """Steps that its geometry lasts, as far as its settings say."""
        defaults = {key: entry.default for key, entry in self.signature.parameters.items()}
        for key in INTERVALS:
            value = {**defaults, **options}.get(key)
            if type(value) is int and value > 0:
                return value
        return 1


@functools.cache
def find(name: str) -> OwnOptimizer:
    """The optimizer of a name.

    Raises:
        LabError: it cannot be imported, or is no optimizer.
    """
    kind = own_code.load(name, "optimizer")
    if not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        raise LabError(
            f"optimizer {name} is no optimizer; expected a class derived from torch.optim.Optimizer"
        )
    if own_code.split(name)[0].partition(".")[0] == "heavyball":
        leave_uncompiled(sys.modules["heavyball"])
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    return OwnOptimizer(name, kind, signature)


def require_rate(name: str) -> float:
    """The class's default rate; a LabError if it has none."""
    rate = find(name).default_rate
    if rate is None:
        raise LabError(
            f"optimizer {name} has no default rate; give one for it, as --lr {name}=.01 for race "
            f"or --rates {name}=.003/.01/.03 for tune"
        )
    return rate


def build(
    name: str, model: nn.Module, lr: float, adamw_lr: float, options: dict[str, Any]
) -> AnyOptimizer:
    """The optimizer of a run.

    Raises:
        LabError: it refuses its settings or the parameters.
    """
    found = find(name)
    settings = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    share = settings.pop(SHARE, None)
    if share is not None and (share not in SHARES or found.takes == "model"):
        expected = "one of " + ", ".join(SHARES) if found.takes != "model" else "none"
        raise LabError(
            f"optimizer {name}: option {SHARE}={share!r}; expected {expected}"
            + (", because it gets the model" if found.takes == "model" else "")
        )
    refusals: list[Exception] = []
    for attempt in _attempts(found, model, lr, adamw_lr, settings, share):
        try:
            made = attempt()
        except Exception as error:  # the user's code may raise anything
            refusals.append(error)
            continue
        _check_groups(name, made)
        return made
    first = refusals[0]
    said = (str(first).strip().splitlines() or [""])[0]
    raise LabError(
        f"optimizer {name} cannot be built from {found.takes} with lr={lr:g}"
        + "".join(f", {key}={value!r}" for key, value in settings.items())
        + f": {type(first).__name__}: {said}; docs/own.md says what a class gets"
    ) from first


def _attempts(
    found: OwnOptimizer,
    model: nn.Module,
    lr: float,
    adamw_lr: float,
    settings: dict[str, Any],
    share: str | None,
) -> Iterator[Callable[[], AnyOptimizer]]:
    """Ways to build it, the first that succeeds counts."""
    make: Callable[..., torch.optim.Optimizer] = found.kind
    if found.takes == "model":
        own = {"adamw_lr": adamw_lr} if "adamw_lr" in found.signature.parameters else {}
        yield lambda: make(model, lr=lr, **own, **settings)
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def given(parameters: Iterable[Tensor]) -> list[Any]:
        if found.takes == "named parameters":
            return [(names[id(parameter)], parameter) for parameter in parameters]
        return list(parameters)

    def combined(share: str) -> AnyOptimizer:
        matrices, rest = matrices_and_rest(model)
        if share == "2d":
            rest = [*rest, *(p for p in matrices if p.ndim != 2)]
            matrices = [p for p in matrices if p.ndim == 2]
        own = make(given(matrices), lr=lr, **settings)
        return CombinedOptimizer([own, *([adamw(rest, adamw_lr)] if rest else [])], NOTES[share])

    if share in (None, "all"):
        trained = [p for p in model.parameters() if p.requires_grad]
        yield lambda: make(given(trained), lr=lr, **settings)
    if share in (None, "matrices"):
        yield lambda: combined("matrices")
    if share in (None, "2d"):
        yield lambda: combined("2d")


def _check_groups(name: str, made: AnyOptimizer) -> None:
    """The schedule sets the rate of every group."""
    for group in made.param_groups:
        if not isinstance(group.get("lr"), int | float):
            raise LabError(
                f"optimizer {name} has a group of parameters whose 'lr' is {group.get('lr')!r}; "
                "expected a number, which the schedule multiplies"
            )
