"""Optimizers of other packages, with their own refresh intervals and default settings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.lab.bench.arms import RATE, BenchArm, CannotTrain, Stepper, beside_adamw
from gomuon.lab.experiments.foreign import leave_uncompiled

Make = Callable[[ModuleType, list[Tensor]], torch.optim.Optimizer]


def load(name: str) -> Any:
    """Import an optional package, hiding a torchvision that was built for another torch.

    Importing such a torchvision fails, and with it transformers and all that imports transformers.

    Raises:
        ImportError: the package is not installed, or one that it needs is missing.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return importlib.import_module(name)


def package(name: str) -> ModuleType:
    """Import another package's module, or say how to install it."""
    try:
        module: ModuleType = load(name)
        return module
    except ImportError as error:
        raise CannotTrain(
            f'{name} is not installed; pip install "gomuon[bench]" ({error})'
        ) from error


def package_arm(
    name: str, title: str, module: str, interval: int, make: Make, note: str = "", **options: bool
) -> BenchArm:
    def build(model: nn.Module) -> Stepper:
        found = package(module)
        return beside_adamw(lambda matrices: make(found, matrices), **options)(model)

    return BenchArm(name, title, module, build, interval, note)


def package_arms(compiled: bool) -> tuple[BenchArm, ...]:
    def quiet(make: Make) -> Make:
        def made(heavyball: ModuleType, matrices: list[Tensor]) -> torch.optim.Optimizer:
            if not compiled:
                leave_uncompiled(heavyball)
            return make(heavyball, matrices)

        return made

    mode = (
        "compiled as it does by default"
        if compiled
        else "not compiled: on a CPU its autotuning takes minutes; --compile leaves it on"
    )
    bfloat = "Newton–Schulz in bfloat16"
    return (
        package_arm(
            "heavyball-muon",
            "heavyball Muon",
            "heavyball",
            1,
            quiet(lambda hb, matrices: hb.Muon(matrices, lr=RATE)),
            f"{mode}; {bfloat}",
        ),
        package_arm(
            "heavyball-soap",
            "heavyball SOAP",
            "heavyball",
            2,
            quiet(lambda hb, matrices: hb.SOAP(matrices, lr=RATE)),
            mode,
        ),
        package_arm(
            "pytorch-optimizer-muon",
            "pytorch_optimizer Muon",
            "pytorch_optimizer",
            1,
            lambda po, matrices: po.Muon([{"params": matrices, "use_muon": True}], lr=RATE),
            bfloat,
        ),
        package_arm(
            "pytorch-optimizer-soap",
            "pytorch_optimizer SOAP",
            "pytorch_optimizer",
            10,
            lambda po, matrices: po.SOAP(matrices, lr=RATE),
        ),
        package_arm(
            "pytorch-optimizer-shampoo",
            "pytorch_optimizer ScalableShampoo",
            "pytorch_optimizer",
            1000,
            lambda po, matrices: po.ScalableShampoo(matrices, lr=RATE),
            "by default it computes roots every 1000 steps, so none falls into the window",
        ),
        package_arm(
            "pytorch-optimizer-shampoo-10",
            "pytorch_optimizer ScalableShampoo, roots every 10",
            "pytorch_optimizer",
            10,
            lambda po, matrices: po.ScalableShampoo(
                matrices, lr=RATE, start_preconditioning_step=1, preconditioning_compute_steps=10
            ),
            "not its default: the interval of our Shampoo",
        ),
    )
