"""On an accelerator no step computes in float64 or calls LAPACK, and only a refresh may wait, once.

Steps are recorded in two ways, see `tests.accelerator`. What is not so yet is listed in `STILL`,
with its numbers. They may only become smaller.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gomuon.recipes.registry import METHODS
from tests.accelerator import HOST, Unwanted, host_as_accelerator, recorded_steps

ROOT = Path(__file__).parents[1]
# The goal, for a refresh step and a reuse step.
REFRESH, REUSE = Unwanted(waits=1), Unwanted()
# By method: float64 operations, decompositions and waits of a refresh step and of a reuse step.
STILL = {
    # Its step needs eigenvectors, not roots; SOAP's needs a QR decomposition.
    "KFAC": (Unwanted(0, 10, 41), Unwanted()),
    "SOAP": (Unwanted(0, 12, 0), Unwanted()),
    # These make new maps in every step.
    "FISMO": (Unwanted(0, 0, 1), Unwanted(0, 0, 1)),
    "MuonQK": (Unwanted(0, 0, 1), Unwanted(0, 0, 1)),
    # A matrix that violates the constraint is bisected, and only the device knows which one does.
    "Halfspace": (Unwanted(0, 0, 7), Unwanted(0, 0, 7)),
}
# Methods whose fake steps end where the size of a tensor is read from the device.
SIZE_IS_READ = {"Halfspace"}


def excess(name: str, refresh: Unwanted, reuse: Unwanted, places: dict[str, int]) -> str:
    """What a method's steps do beyond what is allowed, with the lines to blame; "" if nothing."""
    said = [
        f"a {step} step of {name}: {found}, allowed {most}"
        for step, found, most in zip(
            ("refresh", "reuse"), (refresh, reuse), STILL.get(name, (REFRESH, REUSE)), strict=True
        )
        if not found <= most
    ]
    blamed = [f"{count:6} {place}" for place, count in sorted(places.items())]
    return "\n".join([*said, *blamed]) if said else ""


@pytest.mark.parametrize("name", METHODS)
def test_on_the_host(name: str) -> None:
    """Real tensors on the branch of an accelerator."""
    with host_as_accelerator():
        steps = recorded_steps(name, HOST)
    too_much = excess(name, steps.refresh, steps.reuse, steps.places)
    assert not too_much, too_much


@pytest.mark.slow
def test_on_a_fake_device() -> None:
    """Fake tensors of another device: no copy between it and the host is overlooked."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if not found["device"]:
        pytest.skip("this torch can fake tensors of no device but the CPU")
    methods: dict[str, dict[str, Any]] = found["methods"]
    assert list(methods) == list(METHODS)
    assert {name for name, steps in methods.items() if "failed" in steps} == SIZE_IS_READ
    too_much, reached = [], []
    for name, steps in methods.items():
        if name not in SIZE_IS_READ:
            refresh, reuse = Unwanted(**steps["refresh"]), Unwanted(**steps["reuse"])
            too_much.append(excess(name, refresh, reuse, steps["places"]))
            reached += [name] if refresh <= REFRESH and reuse <= REUSE else []
    assert not any(too_much), "\n".join(filter(None, too_much))
    excused = [name for name in reached if name in STILL and reaches_the_goal_on_the_host(name)]
    assert not excused, f"{excused} have reached the goal: delete them from STILL"


def reaches_the_goal_on_the_host(name: str) -> bool:
    with host_as_accelerator():
        steps = recorded_steps(name, HOST)
    return steps.refresh <= REFRESH and steps.reuse <= REUSE


def test_the_branch_is_really_taken() -> None:
    with host_as_accelerator() as answers:
        recorded_steps("GoMuon", HOST)
    assert any(answer.called for answer in answers)


def test_only_methods_that_exist_are_excused() -> None:
    assert {*STILL, *SIZE_IS_READ} <= set(METHODS)
