"""Steps as an accelerator would take them, recorded operation by operation, on a machine without.

In two ways that complete each other. On the host, real tensors take the branch of the code that an
accelerator takes, so every decision is made by real numbers. But counts and flags that stay on the
host by design look like the device's, so only operations on matrices are counted. With
`python -m tests.accelerator [METHOD …]` the tensors are fake ones of another device, so copies
between it and the host are seen, and code that asks for the type of the device gets the right
answer; it prints what was found as JSON. It needs a process of its own: torch cannot forget a
device.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn import functional as F
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon.capture import hooks
from gomuon.geometry import rotating_basis
from gomuon.lab.costs.recorder import OperationRecorder, RecordedOperation
from gomuon.lab.machine import on_threads
from gomuon.methods import kfac, soap
from gomuon.recipes.registry import METHODS
from tests.models import tokens, transformer

# The function that says whether decompositions are quick on a device, in whichever module it is,
# and with or without an underscore.
BRANCH = "decomposes_well"
HOST = "cpu"
STEPS = 4  # with a refresh every other step, the last two are a refresh step and a reuse step
CLOCKS = {"refresh_every": 2, "statistics_every": 2, "refresh_at": "first"}


@dataclasses.dataclass(frozen=True)
class Unwanted:
    """What a step does that an accelerator should not be asked for.

    Attributes:
        float64: operations with a tensor in float64.
        decompositions: calls of LAPACK or its like.
        waits: how often the host waits for the device.
    """

    float64: int = 0
    decompositions: int = 0
    waits: int = 0

    @classmethod
    def among(cls, operations: list[RecordedOperation]) -> "Unwanted":
        return cls(
            sum(x.is_float64 for x in operations),
            sum(x.decomposition is not None for x in operations),
            sum(x.waits for x in operations),
        )

    def __le__(self, other: "Unwanted") -> bool:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class RecordedSteps:
    """A refresh step and the reuse step after it, and the lines of code to blame."""

    refresh: Unwanted
    reuse: Unwanted
    places: dict[str, int]


class TextAndImages(nn.Module):
    """A transformer and some convolutions side by side: everything that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.text = transformer(dtype=torch.float32, layers=1)
        self.features = nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten()
        )
        self.hidden = nn.Linear(128, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, window: Tensor, images: Tensor) -> Tensor:
        logits = self.text(window[:, :-1]).flatten(0, 1)
        scores = self.head(self.hidden(self.features(images)))
        return F.cross_entropy(logits, window[:, 1:].flatten()) + scores.square().mean()


# The first bases come from many equal steps. To record a few of them is enough.
@mock.patch.object(kfac, "FIRST_STEPS", 2)
@mock.patch.object(soap, "FIRST_STEPS", 2)
@mock.patch.object(rotating_basis, "FIRST_STEPS", 2)
def recorded_steps(name: str, device: str) -> RecordedSteps:
    """The last steps of a method, with their forward and backward passes."""
    kind, model = METHODS[name], _model_on(device)
    known = kind.recipe.settings
    clocks: dict[str, Any] = {key: value for key, value in CLOCKS.items() if key in known}
    optimizer = kind(model, **clocks)
    recorded = []
    for step in range(STEPS):
        batch = tokens(step).to(device), torch.randn(5, 2, 8, 8).to(device)
        record = OperationRecorder() if step >= STEPS - 2 else None  # recording takes a while
        # One thread: there is little to compute, and other processes may need the cores.
        with on_threads(1), record or contextlib.nullcontext():
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        if record is not None:
            recorded.append([x for x in record.operations if _is_the_devices(x, device)])
    refresh, reuse = recorded
    blamed = [x for x in (*refresh, *reuse) if x.waits or x.decomposition or x.is_float64]
    places = Counter(f"{x.place or 'torch'}: {x.name}" for x in blamed)
    return RecordedSteps(Unwanted.among(refresh), Unwanted.among(reuse), dict(places))


def _is_the_devices(operation: RecordedOperation, device: str) -> bool:
    """Whether an operation is the device's, not one on numbers that the host keeps anyway."""
    if device == HOST:
        return any(len(shape) > 1 and min(shape[-2:]) > 1 for shape in operation.shapes)
    return not operation.on_host


def _model_on(device: str) -> nn.Module:
    with unset_fake_temporarily():
        torch.manual_seed(0)
        model = TextAndImages()
    if device != HOST:
        for module in model.modules():
            for key, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, key, nn.Parameter(torch.empty(parameter.shape, device=device)))
    return model


# ---- real tensors --------------------------------------------------------------------------------


@contextlib.contextmanager
def host_as_accelerator() -> Iterator[list[mock.Mock]]:
    """Make the CPU pass for a device whose decompositions are slow, in every module that asks.

    Gives the functions that say so.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("gomuon.")]
    found = [(m, key) for m in modules for key in vars(m) if key.removeprefix("_") == BRANCH]
    assert found, f"no module has a function {BRANCH}; write its new name into BRANCH"
    with contextlib.ExitStack() as patches:
        yield [
            patches.enter_context(mock.patch.object(module, key, return_value=False))
            for module, key in found
        ]


# ---- fake tensors --------------------------------------------------------------------------------


class Answers(TorchDispatchMode):
    """Answers 1, or True, where a value is read: fake tensors have none, and would raise."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def read_at_once(tensor: Tensor) -> Any:
    """`tolist` as on a real device, in one wait: fake tensors read every element alone."""
    values: Any = tensor.flatten()[0].item() if tensor.numel() else None
    for size in reversed(tensor.shape):
        values = [values] * size
    return values


def fake_accelerator() -> str:
    """A device whose tensors torch can fake here; "" if there is none.

    Where torch is built with CUDA that is cuda, present or not. Other builds refuse to index its
    tensors; there, newer versions take a device that is written in Python.
    """
    if torch.backends.cuda.is_built():
        return "cuda"
    add = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if add is None:
        return ""
    module: Any = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    add("standin", backend_module=module)
    return "standin:0"


@contextlib.contextmanager
def faked() -> Iterator[None]:
    patches = (
        # Hooks leave fake tensors alone, because those come from torch.export and the like.
        mock.patch.object(hooks, "can_capture", lambda v, device: v.device == device),
        # torch.tensor(…, device=…) then makes a tensor of the host's and copies it, as it does.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(FakeTensor, "tolist", read_at_once),
        # A fake mode serves one thread; a backward pass on two devices would take two.
        torch.autograd.set_multithreading_enabled(False),
    )
    with contextlib.ExitStack() as entered:
        for context in (*patches, FakeTensorMode(), Answers()):
            entered.enter_context(context)
        yield


def printed_by(module: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON that a module of the tests prints, in a process of its own: see above.

    The test is skipped if there is no device that torch can fake.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    if not answer["device"]:
        pytest.skip("this torch can fake tensors of no device but the CPU")
    return answer


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = fake_accelerator()
    found: dict[str, Any] = {}
    for name in names if device else []:
        with faked():
            try:
                found[name] = dataclasses.asdict(recorded_steps(name, device))
            except DynamicOutputShapeException as error:
                found[name] = {"failed": f"the size of a tensor is read from the device: {error}"}
    print(json.dumps({"device": device, "methods": found}))


if __name__ == "__main__":
    main(sys.argv[1:] or list(METHODS))
