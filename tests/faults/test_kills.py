"""A few seeds of the campaign of kills."""

from tests.faults.campaign import run


def test_a_killed_campaign_is_the_one_that_was_left_alone() -> None:
    assert run("kills", range(6), processes=1).failures == ()
