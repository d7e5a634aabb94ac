"""docs/equations.md against the code: functions cite their numbers, and tests exist."""

import ast
import importlib
import inspect
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.verification.every_statement import STATEMENTS as verify_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "equations.md"
SOURCES = sorted((ROOT / "src" / "gomuon").rglob("*.py"))
EQUATIONS = range(1, 37)
STATEMENTS = {
    *("Theorem 1", "Corollary 2", "Proposition 3", "Corollary 4"),
    *("Proposition 5", "Proposition 6", "Proposition 7"),
}

_LIST = r"\(\d+\)(?:(?:–|,\s|,?\s(?:and|to)\s)\(\d+\))*"
_IN_WORDS = re.compile(rf"Equations?\s({_LIST})")
_IN_COMMENTS = re.compile(r"#\s(\(\d+\).*)")
_NUMBERS = re.compile(r"\((\d+)\)(?:(?:–|\sto\s)\((\d+)\))?")
_STATEMENT = re.compile(r"\b((?:Theorem|Corollary|Proposition)\s\d+)")


# ---- reading the code ----------------------------------------------------------------------------


def cited_equations(source: str) -> set[int]:
    """Numbers cited as "Equation (9)", "Equations (12), (13) and (32)–(34)" or "# (9)"."""
    lists = [*_IN_WORDS.findall(source), *_IN_COMMENTS.findall(source)]
    return {
        number
        for text in lists
        for first, last in _NUMBERS.findall(text)
        for number in range(int(first), int(last or first) + 1)
    }


def cited_statements(source: str) -> set[str]:
    return {" ".join(name.split()) for name in _STATEMENT.findall(source)}


def cites(source: str, name: str) -> bool:
    """Whether the source cites "(9)" or "Theorem 1"."""
    if name.startswith("("):
        return int(name.strip("()")) in cited_equations(source)
    return name in cited_statements(source)


def find(path: str) -> Any:
    """What a dotted path such as gomuon.step.Step.update names."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:end]))
        found = getattr(found, part)
    return found


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# ---- reading the page ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the page: "(9)" or "Theorem 1", its functions, tests and rows of `gomuon verify`."""

    name: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    verified: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def cells_of_rows() -> list[list[str]]:
    """The cells of every row of every table, without the heads."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = ("|---", "| equation |", "| statement |", "| where |")
    found = [line for line in lines if line.startswith("|") and not line.startswith(heads)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


ROWS = [
    Row(name, *map(quoted, (function, test, verified)))
    for name, _, function, test, verified in (row for row in cells_of_rows() if len(row) == 5)
]
VERIFIED = {statement.name for statement in verify_rows}


def test_every_statement_of_the_paper_has_one_row() -> None:
    wanted = Counter([*(f"({number})" for number in EQUATIONS), *STATEMENTS])
    assert Counter(row.name for row in ROWS) == wanted


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_its_functions_exist_and_cite_it(row: Row) -> None:
    assert row.functions, f"{row.name} names no function"
    for path in row.functions:
        function = find(path)
        assert inspect.isfunction(function), f"{path} is not a function"
        assert cites(inspect.getsource(function), row.name), f"{path} does not cite {row.name}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_its_tests_exist(row: Row) -> None:
    assert row.tests, f"{row.name} names no test"
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name.startswith("test_"), f"{test} is not of the form path::test_name"
        assert name in functions_of(ROOT / path), f"{path} has no function {name}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_has_a_row_of_verify(row: Row) -> None:
    assert row.verified, f"{row.name} names no row of gomuon verify"
    assert set(row.verified) <= VERIFIED


def test_every_row_of_verify_is_on_the_page() -> None:
    named = [name for cells in cells_of_rows() for name in quoted(cells[-1])]
    assert set(named) == VERIFIED


def test_sources_cite_what_the_paper_has() -> None:
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        assert cited_equations(source) <= set(EQUATIONS), path
        assert cited_statements(source) <= STATEMENTS, path
        bare = re.findall(r"Equations?\s\d+", source)
        assert bare == [], f'{path}: write "Equation (9)", not "Equation 9"'


def test_citations_are_read_in_every_form() -> None:
    assert cited_equations("Equations (12), (13) and (32)–(34)") == {12, 13, 32, 33, 34}
    assert cited_equations("Equations (27) to (29), then (99)") == {27, 28, 29}
    assert cited_equations("x = 1  # (27) A_t; (28) B_t") == {27, 28}
    assert cited_equations("f(30)  # not (31)") == set()
    assert cited_statements("(Proposition 5,\n    Theorem\n1)") == {"Proposition 5", "Theorem 1"}
