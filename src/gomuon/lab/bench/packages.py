"""Other people's packages, which need not be here."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load(name: str) -> Any:
    """Import a package, kept from a torchvision that was built for another torch.

    Transformers, and what imports it in turn, would stumble over that one.

    Raises:
        ImportError: it is not installed, or lacks something.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return importlib.import_module(name)
