"""Weights that a task trains before a run, kept so that every arm starts from the same bytes."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pooch
import torch
from torch import Tensor

from gomuon.lab.errors import LabError
from gomuon.lab.files import make_folder, write_atomically

Weights = dict[str, Tensor]


def cache_folder() -> Path:
    return Path(pooch.os_cache("gomuon")) / "pretrained"


def cached(facts: Mapping[str, Any], threads: int, make: Callable[[], Weights]) -> Weights:
    """The weights that ``make`` gives, from the cache if they are there.

    Without a cache they are made again: the same bytes on the same machine, since the result
    depends on the facts, the version of torch and the number of threads, and all are fixed here.

    Args:
        facts: everything that ``make`` depends on.
        threads: torch's threads while they are made.
        make: trains the weights.
    """
    known = {**facts, "torch": torch.__version__, "threads": threads}
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_folder() / f"{key}.pt"
    found = _read(path)
    if found is not None:
        return found
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = make()
    finally:
        torch.set_num_threads(before)
    try:
        make_folder(path.parent)
        write_atomically(path, lambda temporary: torch.save(made, temporary))
    except LabError:  # a cache that cannot be written is done without
        return made
    return _read(path) or made


def _read(path: Path) -> Weights | None:
    """Weights from the cache; None if there are none, or the file is damaged."""
    try:
        found = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        return None
    return found if isinstance(found, dict) else None
