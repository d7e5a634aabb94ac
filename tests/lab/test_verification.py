"""`gomuon verify` passes here, and fails if the mathematics is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gomuon.lab import cli, verification
from gomuon.lab.errors import LabError
from gomuon.lab.verification import CHECKS, RandomMatrices, verify


def test_everything_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("holds") == len(CHECKS)
    assert "FAILS" not in shown


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.where)
def test_a_residual_is_a_number_and_not_always_zero(check: verification.Check) -> None:
    found = [
        check.residual(RandomMatrices(torch.device("cpu"), torch.float64, seed))
        for seed in range(3)
    ]
    assert all(residual <= check.most for residual in found)
    # Bounds that hold with room to spare have nothing left over; equalities have their rounding.
    if check.where not in ("Corollary 2", "Proposition 5", "Equation (19)"):
        assert max(found) > 0


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("matched_direction", lambda M, left, right: 1.001 * M),
        ("inverse_root", lambda S, power: torch.eye(len(S), dtype=S.dtype)),
        ("polar", lambda X, method: X / X.norm()),
        ("oas", lambda S, n: (S, torch.tensor(0.5, dtype=S.dtype))),
    ],
)
def test_broken_mathematics_is_found(
    name: str, broken: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, name, broken)
    with pytest.raises(LabError, match="checks fail here"):
        verify(seeds=1)
    assert "FAILS" in capsys.readouterr().out


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slower(verification.GoMuon):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["factor_decay"] = 0.96
            return super().step(closure)

    monkeypatch.setattr(verification, "GoMuon", Slower)
    assert verification.plain_loop(RandomMatrices(torch.device("cpu"), torch.float64, 0)) > 1e-8


def test_not_a_number_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = dataclasses.replace(CHECKS[0], residual=lambda random: float("nan"))
    monkeypatch.setattr(verification, "CHECKS", (nothing,))
    with pytest.raises(LabError, match="1 of 1 checks fail here"):
        verify(seeds=1)


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
