"""A checkpoint that an older version wrote loads, and training continues as it did there."""

from pathlib import Path

import pytest
import torch

import gomuon
from tests.checkpoints.older_versions import SAVED_AT, STEPS, learn, read, settings, small_model

# Written by version 0.1.0, before the library was divided into rooms: see older_versions.py.
SAVED = read(Path(__file__).parent / "version_0_1_0.pt.gz")


@pytest.mark.parametrize("method", list(SAVED))
def test_an_older_checkpoint_loads_and_continues(method: str) -> None:
    saved, model = SAVED[method], small_model()
    model.load_state_dict(saved["model"])
    optimizer = getattr(gomuon, method)(model, **settings(method))
    optimizer.load_state_dict(saved["optimizer"])
    learn(model, optimizer, range(SAVED_AT, STEPS))
    for name, value in model.state_dict().items():
        # Other processors round differently, and SOAP's and Mousse's steps enlarge rounding.
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-6, atol=1e-8, msg=name)
