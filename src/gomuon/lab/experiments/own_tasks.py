"""Tasks from outside the package: what a class must have, and how the lab uses it.

docs/own.md explains the protocol with an example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import own_code, schedules
from gomuon.lab.experiments.content_hash import content_hash
from gomuon.lab.experiments.randomness import seed_all
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig
from gomuon.lab.input_checks import require_positive, require_whole

METHODS = ("model", "batch", "loss", "evaluate", "fingerprint")
RESERVED = ("step", "loss")  # a line of metrics.jsonl has them already
# Attributes a class may have, and what holds without them.
DEFAULTS: dict[str, Any] = {"adamw_lr": 3e-3, "evaluate_every": 50}


class OwnTask(Protocol):
    """A task from outside: it is made as ``Class(seed, steps)``.

    Before each call Python's, NumPy's and torch's random numbers are seeded from the run's seed
    and the update. So ``torch.randn`` and ``nn.Linear`` may be used as they are. Optional
    attributes: ``steps``, ``adamw_lr``, ``evaluate_every`` and ``max_norm`` (gradients are clipped
    to it). Optional method: ``multipliers()``, the schedule as one number per update; without it
    the rates follow a cosine down to 0.
    """

    def model(self) -> nn.Module:
        """The model with its initial parameters."""
        ...

    def batch(self, step: int) -> Any:
        """The batch of update ``step`` (from 1): tensors, or lists and dicts of them.

        It must follow from ``step`` alone, because a stopped run asks for later ones only.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss on the batch, a tensor with one number."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Numbers to record; "validation_loss" decides the race, lower is better."""
        ...

    def fingerprint(self) -> Any:
        """What identifies the data: tensors, texts or numbers, or lists and dicts of these."""
        ...


def load(name: str) -> type:
    """The class of a task.

    Raises:
        LabError: it cannot be imported, or lacks a method.
    """
    found = own_code.load(name, "task")
    lacking = [word for word in METHODS if not callable(getattr(found, word, None))]
    if lacking:
        raise LabError(
            f"task {name} has no method {lacking[0]}(); a task has {', '.join(METHODS)}, see "
            "docs/own.md"
        )
    return found


def defaults(name: str) -> dict[str, Any]:
    """What a class says of itself, in the form of ``tasks.DEFAULTS``; "steps" may be missing.

    Raises:
        LabError: an attribute is no number that fits.
    """
    found = load(name)
    settings = {key: getattr(found, key, value) for key, value in DEFAULTS.items()}
    if hasattr(found, "steps"):
        settings["steps"] = found.steps
    try:
        for key in ("steps", "evaluate_every"):
            if key in settings:
                require_whole(key, settings[key])
        require_positive("adamw_lr", settings["adamw_lr"])
    except LabError as error:
        raise LabError(f"task {name}: its attribute {error}") from error
    return settings


class AdaptedTask:
    """A task from outside in the form of ``tasks.Task``; checks all that it returns."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.name = config, f"task {config.task}"
        found = load(config.task)
        with own_code.blaming(self.name, f"{found.__name__}(seed, steps)"):
            seed_all(config.seed, "task")
            self.task = found(seed=config.seed, steps=config.steps)
        self.max_norm = self._max_norm()

    def _max_norm(self) -> float | None:
        value = getattr(self.task, "max_norm", None)
        if value is not None:
            require_positive(f"{self.name}: max_norm", value)
        return value

    def model(self) -> nn.Module:
        with own_code.blaming(self.name, "model()"):
            seed_all(self.config.seed, "model")
            found = self.task.model()
        if not isinstance(found, nn.Module):
            raise self._wrong("model()", found, "a torch.nn.Module")
        if next(found.parameters(), None) is None:
            raise LabError(f"{self.name}: model() returned a model without parameters")
        return found

    def multipliers(self) -> list[float]:
        steps = self.config.steps
        if not hasattr(self.task, "multipliers"):
            return schedules.cosine(steps)
        with own_code.blaming(self.name, "multipliers()"):
            found = [float(value) for value in self.task.multipliers()]
        if len(found) != steps or not all(0 <= value < math.inf for value in found):
            raise LabError(
                f"{self.name}: multipliers() returned {len(found)} numbers; expected {steps}, one "
                "for each update, none negative and all finite"
            )
        return found

    def fingerprints(self) -> dict[str, Any]:
        with own_code.blaming(self.name, "fingerprint()"):
            found = self.task.fingerprint()
        if found is None:
            raise self._wrong("fingerprint()", found, "what identifies the data")
        source = own_code.source_of(self.config.task, "task")
        return {
            "stream": self._stream(),
            "corpus": self._hash("fingerprint()", found),
            "model": {"kind": self.config.task, "source": source.sha256},
        }

    def _stream(self) -> str:
        """The hash of batches 1, 2, 4, … and the last.

        All others follow from the same seed by the same code, whose hash the model's has.
        """
        last = self.config.steps
        steps = sorted({*(2**i for i in range(last.bit_length())), last})
        hashes = [self._hash(f"batch({step})", self._batch(step)) for step in steps]
        if self._hash("batch(1)", self._batch(1)) != hashes[0]:
            raise LabError(
                f"{self.name}: batch(1) returned something else when it was asked again; a batch "
                "must follow from step alone, so that a stopped run can continue and all arms "
                "see the same"
            )
        return content_hash(hashes)

    def _hash(self, call: str, value: Any) -> str:
        try:
            return content_hash(value)
        except TypeError as error:
            raise LabError(
                f"{self.name}: {call} has {error} in it, which cannot be hashed; return tensors, "
                "arrays, numbers or texts, or lists, tuples and dicts of these"
            ) from error

    def _batch(self, step: int) -> Any:
        with own_code.blaming(self.name, f"batch({step})"):
            seed_all(self.config.seed, "batch", step)
            return self.task.batch(step)

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        batch = self._batch(step)
        seed_all(self.config.seed, "update", step)
        with own_code.blaming(self.name, "loss(model, batch)"):
            found = self.task.loss(model, batch)
        if not isinstance(found, Tensor):
            raise self._wrong("loss(model, batch)", found, "a tensor with one number")
        if found.numel() != 1 or not found.requires_grad:
            grad = "" if found.requires_grad else " without a gradient"
            raise LabError(
                f"{self.name}: loss(model, batch) returned a tensor of shape {list(found.shape)}"
                f"{grad}; expected one number that depends on the parameters"
            )
        return found.reshape(()), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        training = model.training
        with own_code.blaming(self.name, "evaluate(model)"), torch.no_grad():
            seed_all(self.config.seed, "evaluation", step)
            model.eval()
            found = self.task.evaluate(model)
            model.train(training)
        expected = f"a dict of numbers with {VALIDATION_LOSS!r}"
        if not isinstance(found, Mapping):
            raise self._wrong("evaluate(model)", found, expected)
        if VALIDATION_LOSS not in found or set(found) & set(RESERVED):
            raise LabError(
                f"{self.name}: evaluate(model) returned {', '.join(map(str, found)) or 'nothing'}; "
                f"expected {expected}, and without {' and '.join(RESERVED)}, which the lab records"
            )
        try:
            return {str(key): float(value) for key, value in found.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise LabError(
                f"{self.name}: evaluate(model) has a value that is no number ({error}); "
                f"expected {expected}"
            ) from error

    def _wrong(self, call: str, found: Any, expected: str) -> LabError:
        kind = "None" if found is None else f"a {type(found).__name__}"
        return LabError(f"{self.name}: {call} returned {kind}; expected {expected}")
