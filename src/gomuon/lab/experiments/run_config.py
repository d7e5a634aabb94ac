"""The configuration of one run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.own_code import is_own
from gomuon.lab.input_checks import require_positive, require_whole

# Judged by what is not trained on.
HELD_OUT_TASKS = (
    *("nanogpt", "digits-vit", "digits-conv", "digits-lora", "experts", "regression"),
    *("ptb-validation", "shakespeare-validation", "gpt-validation"),
)
VALIDATION_LOSS = "validation_loss"  # what these tasks record
LARGEST_SEED = 2**64 - 1  # of torch's generators
WHOLE = (
    *("steps", "evaluate_every", "checkpoint_every", "threads", "length", "batch"),
    *("width", "layers", "heads", "hidden", "modulus"),
)
KINDS: dict[str, type] = {"task": str, "optimizer": str, "arm": str, "options": dict}
KINDS |= {"telemetry": bool, "label": str}


def is_held_out(task: str) -> bool:
    """Whether a task is judged by what is not trained on; all from outside are."""
    return task in HELD_OUT_TASKS or is_own(task)


@dataclass(frozen=True)
class RunConfig:
    """All settings that determine the results of one run, and its labels."""

    task: str
    optimizer: str
    lr: float  # peak rate of the matrices
    seed: int
    steps: int
    arm: str = ""  # name in the folder and in the report
    adamw_lr: float = 3e-3  # peak rate of embeddings, norms and other vectors
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of the optimizer
    width: int = 128
    layers: int = 3
    heads: int = 4
    hidden: int = 384
    length: int = 128  # characters per sequence; unused by modular addition
    batch: int = 16  # sequences per update; unused by modular addition
    modulus: int = 0  # unused by the character models
    evaluate_every: int = 10
    checkpoint_every: int = 50
    threads: int = 1
    telemetry: bool = False  # count refreshes, and updates against their source or gradient
    label: str = "full"  # "quick" for a run shorter than declared

    def __post_init__(self) -> None:
        # Types are checked too: a configuration may come from a file.
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise LabError(f"{name} must be of type {kind.__name__}, not {value!r}")
        for name in WHOLE:
            require_whole(name, getattr(self, name), least=0 if name == "modulus" else 1)
        for name in ("lr", "adamw_lr"):
            require_positive(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise LabError(f"seed must be a whole number, not {self.seed!r}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise LabError(f"seed must be between 0 and {LARGEST_SEED}, not {self.seed}")
        if self.label not in ("quick", "full"):
            raise LabError(f"label must be 'quick' or 'full', not {self.label!r}")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path) -> RunConfig:
        """The configuration in a manifest; errors name the file ``where``."""
        known = {f.name for f in dataclasses.fields(cls)}
        foreign = sorted(set(values) - known)
        if foreign:
            raise LabError(f"{where}: unknown configuration field {foreign[0]!r}")
        try:
            return cls(**values)
        except (TypeError, LabError) as error:
            raise LabError(f"{where}: invalid configuration ({error})") from error
