"""The libraries people train with, driven for real."""

import importlib
import os
import sys
from types import ModuleType

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported: nothing may be fetched


def _mend_torchvision() -> None:
    """Let a torchvision built for another torch be imported, without its compiled operators.

    Transformers and Lightning import it wherever it is installed, and it stumbles over the file
    that describes those operators to torch.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        described = "torchvision._meta_registrations"
        sys.modules[described] = ModuleType(described)


_mend_torchvision()
