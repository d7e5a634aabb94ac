"""A few cases of the campaign; `python -m tests.faults calls` runs them all."""

from tests.faults.campaign import run


def test_arguments_at_random_are_taken_or_named() -> None:
    assert run("calls", range(100, 500), processes=1).failures == ()
