"""A method in one file outside the package goes everywhere the package's own methods go.

The file is the example in docs/methods.md.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.lab.helpers.commands import TINY, refused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods.md"
# The table-driven tests: what every method promises, and what its steps multiply and keep.
EVERY_METHOD = "tests/methods/test_every_method.py"
EVERY_COST = "tests/lab/costs/test_unit_costs.py"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """The example's file."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## Your own method")
    block = re.search(r"(?:^    .*\n|^\n)+(?=`work` may)", section, re.MULTILINE)
    assert block is not None
    file = tmp_path / "toy_muon.py"
    file.write_text(textwrap.dedent(block[0]).strip() + "\n", encoding="utf-8")
    return file


def run(words: list[str], folder: Path) -> str:
    """What a Python process with the toy's folder in its path prints."""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT if words[0] == "pytest" else folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_keeps_every_promise_and_its_costs_are_true(toy: Path) -> None:
    tables = [EVERY_METHOD, EVERY_COST]
    text = run(["pytest", *tables, "-k", "Toy", "-p", toy.stem, "-q", "-n", "0"], toy.parent)
    passed = re.search(r"(\d+) passed", text)
    assert passed is not None
    assert int(passed[1]) >= 15
    assert "skipped" not in text


def test_the_commands_know_it(toy: Path) -> None:
    known = ["gomuon", "--import", str(toy)]
    shown = run([*known, "methods", "toy-muon"], toy.parent)
    assert "toy_muon.ToyMuon" in shown
    assert re.search(r"^  iterations +5 *$", shown, re.MULTILINE)
    # By its module's name, which is found in the current folder.
    assert "ToyMuon" in run(["gomuon", f"--import={toy.stem}", "methods"], toy.parent)

    costs = ["plan", "character", "--optimizers", "muon,toy-muon", "--json"]
    muon, own = json.loads(run([*known, *costs], toy.parent))["methods"]
    assert own["method"] == "toy-muon"
    # Three layers: four matrices 128×128 and two 384×128 each, and one 128×384.
    both = 12 * 128**3 + 6 * 384 * 384 * 128 + 3 * 128 * 128 * 384  # m²n, for YYᵀ and for (YYᵀ)Y
    assert own["reuse"]["largest"] == 5 * 2 * 2 * both
    assert own["state"] == muon["state"]


def test_it_races(toy: Path) -> None:
    race = ["race", "--optimizers", "toy-muon,adamw", "--steps", "4", "--jobs", "2", *TINY]
    text = run(["gomuon", "--import", toy.name, *race, "--out", "raced"], toy.parent)
    assert re.search(r"^\W*ToyMuon 0\.02\b", text, re.MULTILINE)
    recorded = json.loads((toy.parent / "raced" / "plan.json").read_text(encoding="utf-8"))
    assert recorded["argv"][:2] == ["--import", toy.name]


@pytest.mark.parametrize(
    ("given", "source", "words"),
    [
        ("no_such_module", "", "--import no_such_module cannot be imported: ModuleNotFoundError"),
        ("nowhere/to_be.py", "", "nowhere/to_be.py: there is no such file"),
        ("unfinished_one.py", "def", "unfinished_one.py cannot be imported: SyntaxError"),
        ("ending_one.py", "raise SystemExit(3)", "ending_one.py cannot be imported: SystemExit"),
        ("empty_one.py", "", "empty_one.py registers no method; decorate its class with @gomuon"),
        ("json.py", "", "another module is named 'json'; give the file another name"),
        ("json", "", "--import json registers no method"),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(
    given: str,
    source: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/" not in given and given.endswith(".py"):
        Path(given).write_text(source, encoding="utf-8")
    before = list(sys.path)
    assert words in refused(["--import", given, "methods"], capsys)
    assert sys.path == before


def test_an_import_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--import needs a file or a module" in refused(["--import"], capsys)
    assert "--import is empty" in refused(["--import=", "methods"], capsys)
