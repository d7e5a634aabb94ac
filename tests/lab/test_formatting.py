"""Numbers as text."""

from __future__ import annotations

from gomuon.lab.formatting import duration


def test_times_are_words() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 7325, None)] == [
        "0 s",
        "1 min 00 s",
        "1 min 01 s",
        "2 h 02 min",
        "some time",
    ]
