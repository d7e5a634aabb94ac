"""Ranks of a world of `tests/distributed/launcher.py`, as training libraries find them."""

import os

from tests.distributed.launcher import Place


def as_torchrun_does(place: Place) -> None:
    """Set the variables by which libraries know that torchrun has started this process.

    The process group exists already; both libraries take the one that is there.
    """
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(place.size),
        LOCAL_WORLD_SIZE=str(place.size),
        MASTER_PORT="29500",  # asked for, never opened
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_RESTART_COUNT="0",
    )
