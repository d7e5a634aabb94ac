"""docs/own.md prints the examples as they are, and its commands run as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gomuon.lab import cli
from tests.versions import HAS_MUON

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_prints_the_examples() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    examples = [ROOT / "examples" / name for name in ("own_task.py", "own_optimizer.py")]
    assert blocks == [path.read_text(encoding="utf-8") for path in examples]


def test_its_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, in one folder that has the examples; with fewer updates and seeds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "gomuon"
        if "heavyball" in command:
            pytest.importorskip("heavyball")
        if "torch.optim:Muon" in command and not HAS_MUON:
            continue
        if words[0] != "report":
            if "--seeds" in words and words[0] == "race":
                words[words.index("--seeds") + 1] = "0"
            words += ["--steps", "4", "--jobs", "1", "--threads", "1"]
        assert cli.main(words) == 0, command
    said = capsys.readouterr().out
    assert "torch.optim:Muon gets the matrices" in said or not HAS_MUON
    assert (tmp_path / "runs" / "race-own" / "report.html").exists()
    assert (tmp_path / "runs" / "race-own_task-Checkerboard" / "plan.json").exists()
