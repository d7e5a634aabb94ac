"""Watched steps as an accelerator would take them; see `tests.accelerator`.

With `python -m tests.watching.accelerator` on fake tensors of another device; prints JSON.
"""

import contextlib
import dataclasses
import json
import warnings
from typing import Any
from unittest import mock

import torch

from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.lab.machine import on_threads
from gomuon.methods import kfac, soap
from gomuon.recipes.registry import METHODS
from tests.accelerator import (
    CLOCKS,
    Unwanted,
    _is_the_devices,
    _model_on,
    fake_accelerator,
    faked,
)
from tests.models import tokens

NAMES = ("GoMuon", "Muon", "KFAC", "Shampoo", "SOAP")
FAKED = ("GoMuon", "Muon", "Shampoo")  # fake tensors are slow
EVERY, STEPS = 2, 4  # with a refresh every other step; the last two steps are one window


@mock.patch.object(kfac, "FIRST_STEPS", 2)
@mock.patch.object(soap, "FIRST_STEPS", 2)
def window(name: str, device: str, *, watched: bool) -> list[Unwanted]:
    """What the steps of a whole window ask of the device, the last one with a record."""
    kind, model = METHODS[name], _model_on(device)
    known = kind.recipe.settings
    clocks: dict[str, Any] = {key: value for key, value in CLOCKS.items() if key in known}
    optimizer = kind(model, **clocks)
    written: list[Any] = []
    if watched:
        optimizer.watch(every=EVERY, to=written.extend, spectra=1)
    found = []
    for step in range(STEPS):
        batch = tokens(step).to(device), torch.randn(5, 2, 8, 8).to(device)
        record = OperationRecorder() if step >= STEPS - EVERY else None
        # Fake tensors do not bear the thread that a device has in backward passes.
        in_this_thread = torch.autograd.set_multithreading_enabled(False)
        with on_threads(1), in_this_thread, record or contextlib.nullcontext():
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        if record is not None:
            done = [x for x in record.operations if _is_the_devices(x, device)]
            found.append(Unwanted.among(done))
    assert bool(written) == watched
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    device = fake_accelerator()
    found: dict[str, Any] = {}
    for name in FAKED if device else ():
        for watched in (False, True):
            with faked():
                steps = window(name, device, watched=watched)
            found[f"{name} {watched}"] = [dataclasses.asdict(step) for step in steps]
    print(json.dumps({"device": device, "found": found}))


if __name__ == "__main__":
    main()
