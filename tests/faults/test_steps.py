"""A few of the campaign's cases, and that it can fail."""

import pytest
import torch

from tests.faults.campaign import run
from tests.faults.steps import EVERY, FAULTS, faulty

FEW = 150  # cases


def test_five_clean_steps_train_after_any_fault() -> None:
    assert len(EVERY) >= 10_000
    assert run("steps", range(FEW), processes=1).failures == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_the_method_itself(fault: str) -> None:
    for place in ("inputs", "gradients"):
        assert faulty(0, torch.float32, "skip", fault, place, 4) is None
