"""`gomuon verify` passes here, says so legibly, and fails if the mathematics is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.functional import oracle, polar_factor
from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.verification import command
from gomuon.lab.verification.adversary import Effort, Found
from gomuon.lab.verification.command import verify
from gomuon.lab.verification.every_statement import STATEMENTS
from gomuon.lab.verification.live_checks import Tally
from gomuon.lab.verification.oracle_statements import ORACLE
from gomuon.lab.verification.statement import Statement
from gomuon.lab.verification.verdict import Verdict

QUICK = ["verify", "--seeds", "1", "--quick"]


def test_everything_holds_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(QUICK) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line for line in shown.splitlines() if line.rstrip().endswith("holds")]
    assert len(rows) == len(STATEMENTS)
    for statement, row in zip(STATEMENTS, rows, strict=True):
        assert row.split("  ")[0].strip() == statement.name, "a row is one line"
    assert "FAILS" not in shown


def without_right(
    M: Tensor, left: Tensor, right: Tensor, *, polar_method: Any = "svd"
) -> tuple[Tensor, Tensor]:
    Q = oracle.inside_only_direction(M, left, right, polar_method=polar_method)
    return left @ Q, polar_factor.rank_of(Q)


@pytest.mark.parametrize("where", ["gomuon.functional.oracle", "gomuon.recipes.stations"])
def test_a_map_back_without_P_A_fails_with_its_row_named(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the function that the search asks, and in the step that the live run watches."""
    some = [one for one in STATEMENTS if one in ORACLE or one.name == "root maps"]
    monkeypatch.setattr(command, "STATEMENTS", some)
    monkeypatch.setattr(f"{where}.matched_direction", without_right)
    assert cli.main([*QUICK, "--json"]) == 2
    told = capsys.readouterr()
    assert "statements fail here: " in told.err
    assert "matched oracle (Theorem 1; slack" in told.err
    assert "cached geometry (Cor. 2; slack" in told.err
    failed = {row["statement"] for row in json.loads(told.out)["statements"] if not row["holds"]}
    assert {"matched oracle", "cached geometry"} <= failed
    assert "root maps" not in failed
    assert not json.loads(told.out)["holds"]


def test_json_has_what_the_table_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [one for one in STATEMENTS if one.name in ("matched oracle", "lag 32.3714")]
    monkeypatch.setattr(command, "STATEMENTS", some)
    assert cli.main([*QUICK, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["seeds"], told["holds"]) == ("cpu", 1, True)
    matched, lag = told["statements"]
    assert matched["where"] == "Theorem 1"
    assert matched["tried"] > 1000
    assert matched["live"]["checks"] == 200
    assert -1e-9 <= matched["slack"] <= 0
    assert lag["tried"] == 1
    assert lag["live"] is None


def made(found: float, live: float | None = None, allowed: float = 0.1) -> Verdict:
    statement = Statement("made", "nowhere", "", lambda effort, generator: Found(1, 0), allowed)
    return Verdict(statement, Found(1, found), Tally() if live is None else Tally(1, live))


@pytest.mark.parametrize(
    ("verdict", "holds"),
    [
        (made(0.0), True),
        (made(-0.1), True),
        (made(-0.2), False),
        (made(0.0, -0.2), False),
        (made(-0.2, 0.0), False),
        (made(0.5, 0.0), True),
        (made(float("nan")), False),
        (made(0.0, float("nan")), False),
        (made(float("-inf")), False),
    ],
)
def test_search_and_live_run_must_both_hold(verdict: Verdict, holds: bool) -> None:
    assert verdict.holds is holds
    assert json.loads(json.dumps(verdict.as_dict(), allow_nan=False))["holds"] is holds


def test_not_a_number_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(effort: Effort, generator: torch.Generator) -> Found:
        return Found(1, float("nan"))

    monkeypatch.setattr(command, "STATEMENTS", [Statement("nonsense", "nowhere", "", nothing)])
    with pytest.raises(LabError, match=r"1 of 1 statements fail here: nonsense \(nowhere; slack"):
        verify(seeds=1, quick=True)
    assert "FAILS" in capsys.readouterr().out


def test_the_thread_count_is_as_before() -> None:
    before = torch.get_num_threads()
    with pytest.raises(LabError):
        verify(device="nowhere")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--device", "nowhere"], "--device 'nowhere' cannot be used in float64"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err
