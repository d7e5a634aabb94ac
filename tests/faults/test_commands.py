"""A few seeds of the campaign of command lines."""

from tests.faults.campaign import run


def test_commands_are_carried_out_or_refused_in_words() -> None:
    assert run("commands", range(40), processes=1).failures == ()
