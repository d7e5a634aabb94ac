"""The code of README runs as it is printed."""

import re
import warnings
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_code_of_the_readme_runs_as_printed() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    reader: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in blocks:
            exec(compile(block, "README.md", "exec"), reader)
    assert reader["optimizer"].param_groups[0]["step"] == len(reader["batches"])
