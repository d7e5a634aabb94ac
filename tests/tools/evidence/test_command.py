"""The command line refuses bad input in one line and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.evidence.made_results import refused, small_plan, thin_campaign
from tools.evidence.command import main

RED = "\x1b[31mred\x1b[0m"


@pytest.fixture
def refused_without_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], str]:
    """The one line of a command refused in an empty folder, which stays empty."""

    def run(words: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        line = refused(words, capsys)
        assert not list(tmp_path.iterdir())
        return line

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--name ptb", "--name is for --collect"),
        ("--results nowhere", "nowhere does not exist; python -m tools.evidence --collect"),
        (f"--results {'x' * 300}", "does not exist"),
        ("--collect nowhere --name ptb", "nowhere is neither a campaign nor a run"),
        ("--collect nowhere", "unknown campaign 'nowhere'"),
        (f"--collect x --name {RED}", "unknown campaign '\\x1b[31mred"),
        ("--name=", "--name is empty; give it a value, or leave it out"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, words: str, refused_without_a_trace: Callable[[list[str]], str]
) -> None:
    line = refused_without_a_trace(arguments.split())
    assert words in line
    assert "\x1b" not in line


@pytest.mark.parametrize("argv", ["gomuon race", [1], {"race": 1}])
def test_a_command_that_is_no_list_of_words_is_named(
    argv: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = thin_campaign(tmp_path / "results" / "ptb", small_plan())
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "argv": argv}))
    words = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs")]
    assert f"plan.json: argv must be a list of words, not {argv!r}" in refused(words, capsys)


def test_a_campaign_without_a_recorded_command_says_so(tmp_path: Path) -> None:
    folder = thin_campaign(tmp_path / "results" / "ptb", small_plan())
    plan = json.loads((folder / "plan.json").read_text())
    del plan["argv"]
    (folder / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "docs"
    assert main(["--results", str(tmp_path / "results"), "--out", str(out)]) == 0
    page = (out / "reproduction.md").read_text()
    assert "made by a command that was not recorded." in page
