"""The code of the site's own pages runs as it is printed, from top to bottom of each page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"


def run(name: str) -> dict[str, Any]:
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    reader: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), reader)
    return reader


@pytest.mark.filterwarnings("error")
def test_from_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = run("from-adamw.md")
    said = capsys.readouterr().out
    assert "output head" in said  # the routing table
    assert torch.isfinite(reader["loss"])
    assert reader["optimizer"].param_groups[0]["step"] == 60  # 20 from the checkpoint, 40 watched


def test_how_it_works() -> None:
    reader = run("how-it-works.md")
    assert torch.isclose(reader["step"].norm(), torch.tensor(6.0, dtype=torch.float64).sqrt())
