"""Fixtures that several commands' tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.helpers.commands import refused


@pytest.fixture
def refused_without_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """The one line of a command refused in an empty folder, which stays empty."""

    def run(command: str) -> str:
        monkeypatch.chdir(tmp_path)
        words = refused(command.split(), capsys)
        assert not list(tmp_path.iterdir())
        return words

    return run
