"""`gomuon methods` and docs/methods.md say of every recipe what the table of recipes says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import gomuon
from gomuon.lab import cli
from gomuon.lab.experiments.optimizers import command_name, entries
from gomuon.lab.report import terminal_methods
from gomuon.lab.report.methods_page import markdown
from gomuon.lab.report.terminal_methods import axes, recipes
from gomuon.recipes.registry import METHODS
from tests.lab.test_cli import refused

DOCS = Path(__file__).parents[3] / "docs" / "methods.md"
SEVEN = ["Muon", "KFAC", "Shampoo", "SOAP", "Mousse", "FISMO", "GoMuon"]


def printed(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int = 80,
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["methods", *arguments]) == 0
    return capsys.readouterr().out


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("GoMuon", "go-muon"),
        ("MuonQK", "muon-qk"),
        ("KFAC", "kfac"),
        ("KFACMuon", "kfac-muon"),
        ("MatchedKFAC", "matched-kfac"),
        ("FISMO", "fismo"),
        ("MuonEq", "muon-eq"),
    ],
)
def test_classes_are_spelled_for_the_command_line(name: str, spelled: str) -> None:
    assert command_name(name) == spelled


@pytest.mark.parametrize("columns", [60, 80, 140, 200])
def test_the_table_shows_every_recipe_and_stays_on_the_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed([], capsys, monkeypatch, columns)
    assert max(cell_len(line) for line in text.splitlines()) <= columns
    names = re.findall(r"^ *(\w+)  ", text, re.MULTILINE)
    shown = [name for name in names if name in METHODS]
    assert shown == list(METHODS)
    assert shown[:7] == SEVEN
    for variant in ("go-muon-input is GoMuon", "go-muon-output is GoMuon", "muon-heads is Muon"):
        assert variant in text


def test_the_narrow_list_leaves_nothing_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = squeezed(printed([], capsys, monkeypatch))
    for recipe in recipes():
        for value in axes(recipe):
            assert squeezed(value) in text


@pytest.mark.parametrize("name", [*entries(), "GoMuon", "KFACMuon"])
def test_one_method_is_shown_in_full(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entries()[command_name(name)]
    text = printed([name], capsys, monkeypatch)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    for setting, value in {**entry.recipe.defaults, **entry.options}.items():
        assert re.search(rf"^  {setting} +{re.escape(repr(value))} *$", text, re.MULTILINE)
    assert squeezed(entry.recipe.formula) in squeezed(text)
    words = getattr(gomuon, entry.recipe.name).__doc__
    assert squeezed(words) in squeezed(text)


def test_an_unknown_method_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown method 'go-muo'; did you mean 'go-muon'?" in refused(
        ["methods", "go-muo"], capsys
    )
    assert "known: " in refused(["methods", "zzz"], capsys)


def test_the_committed_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(["--markdown"], capsys, monkeypatch)
    assert DOCS.read_text(encoding="utf-8") == text, "run: make pages"


def test_the_page_has_every_formula_and_calls_that_are_true() -> None:
    text = markdown()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [*METHODS, "Variants"]
    calls = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    for recipe, source in zip(recipes(), calls, strict=True):
        assert squeezed(recipe.formula) in squeezed(text)
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert call.func.id == recipe.name
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        assert given == recipe.defaults


def test_markup_in_the_data_is_escaped() -> None:
    lines = markdown().splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {9}
    assert len(rows) == 2 + len(METHODS)
    assert r"\[(V\_Bᵀ G V\_A)" in next(row for row in rows if "[KFAC]" in row)


def test_a_docstring_keeps_its_formulas_and_its_entries() -> None:
    text = "A line\nthat goes on::\n\n    x  =  1\n    y  =  2\n\n"
    text += "Args:\n    a: one\n        more\n    b: two"
    assert list(terminal_methods.reflow(text, 12)) == [
        *("A line that", "goes on::", "", "    x  =  1", "    y  =  2", ""),
        *("Args:", "    a: one", "        more", "    b: two", ""),
    ]
