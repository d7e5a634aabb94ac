"""Every statement holds, and its search notices when it does not."""

from __future__ import annotations

import pytest
import torch

from gomuon.lab.verification.adversary import Case, Effort, Found, attack
from gomuon.lab.verification.every_statement import STATEMENTS
from gomuon.lab.verification.label_statements import mismatch_bound
from gomuon.lab.verification.statement import Statement
from gomuon.lab.verification.unknowns import Distribution
from tests.lab.verification.broken import BROKEN

EFFORT = Effort(torch.device("cpu"), seeds=1, rounds=15)
EVERY = pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.name)


def searched(statement: Statement) -> Found:
    return statement.search(EFFORT, EFFORT.generator(statement.name))


@EVERY
def test_it_holds(statement: Statement) -> None:
    found = searched(statement)
    assert found.slack >= -statement.allowed
    assert found.tried >= 1


@EVERY
def test_it_is_noticed_when_it_is_broken(
    statement: Statement, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BROKEN[statement.name]
    monkeypatch.setattr(broken.module, broken.name, broken.instead)
    assert not searched(statement).slack >= -statement.allowed


def test_every_statement_has_a_broken_form_and_a_name_of_its_own() -> None:
    names = [statement.name for statement in STATEMENTS]
    assert len(set(names)) == len(names)
    assert set(BROKEN) == set(names)
    assert len(names) >= 16


def test_bounds_that_the_proofs_attain_are_attained() -> None:
    """A search that stays far away from a tight bound would notice little."""
    tight = {
        "grafted alignment",
        "grafted conditioning",
        "condition number after OAS",
        "four parts of factor error",
        "factor consistency",
        "cached geometry",
    }
    for statement in STATEMENTS:
        if statement.name in tight:
            assert searched(statement).slack < 1e-3, statement.name


@pytest.mark.parametrize(("classes", "ratio"), [(2, 2**0.5), (3, 1.5), (8, None)])
def test_how_near_anything_comes_to_the_mismatch_bound(classes: int, ratio: float | None) -> None:
    """Proposition 3's constant is 3, and it is not attained."""
    effort = Effort(torch.device("cpu"), seeds=5)
    case = Case((Distribution(classes), Distribution(classes)), mismatch_bound)
    reached = 1 - attack(case, effort, effort.generator("mismatch")).slack
    assert 0.4 < reached < 0.55
    if ratio is not None:
        assert reached == pytest.approx(ratio / 3, rel=1e-3)
