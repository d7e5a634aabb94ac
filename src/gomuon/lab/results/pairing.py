"""Check that two runs may be compared: hashes of everything except the optimizer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor, nn

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.content_hash import add_tensor
from gomuon.lab.experiments.tasks import Task
from gomuon.lab.results.runs import Run

# The first field that differs is reported.
FIELDS = ("corpus", "model", "schedule", "stream", "parameters")


def hash_value(value: Any) -> str:
    """sha256 of a tensor's dtype, shape and bytes, or of a value's canonical JSON.

    A string is returned as it is: it is a sha256 already.
    """
    if isinstance(value, str):
        return value
    digest = hashlib.sha256()
    if isinstance(value, Tensor):
        add_tensor(digest, value)
    else:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
        digest.update(canonical.encode())
    return digest.hexdigest()


def hash_parameters(model: nn.Module) -> str:
    """sha256 over name, dtype, shape and bytes of every parameter, sorted by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0")
        add_tensor(digest, parameter)
    return digest.hexdigest()


def hashes(task: Task, model: nn.Module) -> dict[str, str]:
    """The five hashes of a run before its first update."""
    fingerprints = task.fingerprints()
    return {
        "corpus": hash_value(fingerprints["corpus"]),
        "model": hash_value(fingerprints["model"]),
        # The multipliers only: arms may differ in their peak rate.
        "schedule": hash_value(task.multipliers()),
        "stream": hash_value(fingerprints["stream"]),
        "parameters": hash_parameters(model),
    }


def differing_fields(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """The fields whose hashes differ or are missing in a run."""
    return [
        field
        for field in FIELDS
        if first.get(field) is None or first.get(field) != second.get(field)
    ]


def require_pair(first: Run, second: Run) -> None:
    """Require that all hashes and the seeds of two runs agree.

    Raises:
        LabError: the runs may not be compared; the message names the field that differs.
    """
    differing = differing_fields(first.hashes, second.hashes)
    if differing:
        raise LabError(
            f"{first.folder} and {second.folder} may not be compared: "
            f"their {differing[0]} hashes differ"
        )
    if first.config.seed != second.config.seed:
        raise LabError(f"{first.folder} and {second.folder} may not be compared: seeds differ")
