"""Random numbers of code that is not ours: all of them follow from the seed and the update.

So a stopped run continues with the numbers it would have had, and paired arms have the same ones,
whatever an arm drew before.
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def seed_all(seed: int, purpose: str, step: int = 0) -> None:
    """Seed Python, NumPy and torch for one purpose of one update."""
    digest = hashlib.sha256(f"{seed} {purpose} {step}".encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    random.seed(number)
    numpy.random.seed(number % 2**32)  # noqa: NPY002 (users draw from it)
    torch.manual_seed(number)
