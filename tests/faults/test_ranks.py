"""A few seeds of the campaign: one rank killed, one that raises."""

import pytest

from tests.faults.campaign import run
from tests.faults.ranks import CASES, fault_of

QUICK = [
    next(seed for seed in range(CASES) if fault_of(seed).what == what) for what in ("kill", "raise")
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_notice_that_one_is_gone() -> None:
    assert run("ranks", QUICK, processes=1).failures == ()
