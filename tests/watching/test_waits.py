"""On an accelerator the device is read once for each record, and nothing is decomposed for it."""

from typing import Any

import pytest

from tests.accelerator import HOST, Unwanted, host_as_accelerator, printed_by
from tests.watching.accelerator import EVERY, FAKED, NAMES, window


@pytest.mark.parametrize("name", NAMES)
def test_on_the_host(name: str) -> None:
    """Real tensors on the branch of an accelerator; what is read there is no matrix."""
    with host_as_accelerator():
        plain, watched = (window(name, HOST, watched=watched) for watched in (False, True))
    for before, after in zip(plain, watched, strict=True):
        assert (after.decompositions, after.float64) == (before.decompositions, before.float64)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Counts of every step, in a process of its own: torch cannot forget a device."""
    found: dict[str, Any] = printed_by("tests.watching.accelerator")["found"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAKED)
def test_one_wait_for_each_record(found: dict[str, Any], name: str) -> None:
    plain, watched = (
        [Unwanted(**step) for step in found[f"{name} {is_watched}"]] for is_watched in (False, True)
    )
    more = [after.waits - before.waits for before, after in zip(plain, watched, strict=True)]
    assert more == [0] * (EVERY - 1) + [1]
    assert all(step.decompositions == step.float64 == 0 for step in watched)
