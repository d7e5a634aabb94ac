"""A few cases of the campaign `checkpoints`."""

from tests.faults.campaign import run


def test_damaged_checkpoints_are_refused_or_trained_on() -> None:
    assert run("checkpoints", range(40), processes=1).failures == ()
