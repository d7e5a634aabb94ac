"""On an accelerator no step computes in float64 or calls LAPACK, and only a refresh may wait, once.

Steps are recorded in two ways, see `tests.accelerator`.
"""

from typing import Any

import pytest

from gomuon.recipes.registry import METHODS
from gomuon.recipes.stations import EVERY_STEP
from tests.accelerator import HOST, Unwanted, host_as_accelerator, printed_by, recorded_steps

# What a refresh step and a reuse step may do.
REFRESH, REUSE = Unwanted(waits=1), Unwanted()


def makes_new_maps_in_every_step(name: str) -> bool:
    """Whether a method takes roots and has no clock: then every step of it is a refresh."""
    recipe = METHODS[name].recipe
    return "roots" in recipe.settings and recipe.clock == EVERY_STEP


def allowed(name: str) -> tuple[Unwanted, Unwanted]:
    """What a method's refresh step and the step after it may do."""
    return REFRESH, REFRESH if makes_new_maps_in_every_step(name) else REUSE


def excess(name: str, refresh: Unwanted, reuse: Unwanted, places: dict[str, int]) -> str:
    """What a method's steps do beyond what is allowed, with the lines to blame; "" if nothing."""
    said = [
        f"a {step} step of {name}: {found}, allowed {most}"
        for step, found, most in zip(
            ("refresh", "reuse"), (refresh, reuse), allowed(name), strict=True
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


PARTS = 4  # of the methods, each in a process of its own, because fake tensors take a while


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_on_a_fake_device(part: int) -> None:
    """Fake tensors of another device: no copy between it and the host is overlooked."""
    names = list(METHODS)[part::PARTS]
    methods: dict[str, dict[str, Any]] = printed_by("tests.accelerator", names)["methods"]
    assert list(methods) == names
    # A step fails here if the size of one of its tensors is read from the device.
    assert not {name: steps["failed"] for name, steps in methods.items() if "failed" in steps}
    too_much = [
        excess(name, Unwanted(**steps["refresh"]), Unwanted(**steps["reuse"]), steps["places"])
        for name, steps in methods.items()
    ]
    assert not any(too_much), "\n".join(filter(None, too_much))


def test_the_branch_is_really_taken() -> None:
    with host_as_accelerator() as answers:
        recorded_steps("GoMuon", HOST)
    assert any(answer.called for answer in answers)


def test_two_methods_make_new_maps_in_every_step() -> None:
    assert {name for name in METHODS if makes_new_maps_in_every_step(name)} == {"FISMO", "MuonQK"}
