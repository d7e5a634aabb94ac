"""Run a command that must be refused, and options that make runs tiny."""

from __future__ import annotations

import pytest

from gomuon.lab import cli

TINY = [*("--width", "8"), *("--layers", "1"), *("--heads", "2"), *("--hidden", "8")]


TINY += [*("--modulus", "5"), *("--threads", "1")]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line a refused command prints."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("gomuon: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err + said.out
    return said.err
