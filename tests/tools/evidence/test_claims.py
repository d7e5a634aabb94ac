"""Each claim's verdict follows from the numbers by its rule."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.experiments import published
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.run_config import RunConfig
from tests.tools.evidence.made_results import Change, edit, grokked, thin_campaign, windowed
from tools.evidence import claims, picture_data
from tools.evidence.results_folder import read_evidence

ROOT = Path(__file__).parents[3]
PTB = published.PTB.windows


def scaled(windows: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * mean for name, mean in windows.items()}


def verdict(tmp_path: Path, place: int, campaign: str, change: Change) -> tuple[str, str]:
    """Of the claim in that place of the list, after the campaign has run with these outcomes."""
    thin_campaign(tmp_path / campaign, EXPERIMENTS[campaign], change)
    claim = (*claims.ABSTRACT, *claims.FURTHER)[place - 1]
    assert claim.campaign == campaign
    return claim.finding(read_evidence(tmp_path))


@pytest.mark.parametrize(
    ("muon", "go", "wanted", "words"),
    [
        (1.0, 1.0, "reproduced", "0.38 % lower than Muon"),
        (1.0, 0.98, "qualified", "3 of 6 window means within 1 % of the paper's"),
        (1.0, 1.009, "not reproduced", "0.51 % higher than Muon"),
    ],
)
def test_the_ptb_rule(tmp_path: Path, muon: float, go: float, wanted: str, words: str) -> None:
    change = windowed({"muon": scaled(PTB["muon"], muon), "go-muon": scaled(PTB["go-muon"], go)})
    found, why = verdict(tmp_path, 4, "ptb", change)
    assert found == wanted
    assert words in why


def test_one_lost_pair_qualifies(tmp_path: Path) -> None:
    usual = windowed(PTB)

    def change(config: RunConfig) -> Mapping[str, Any]:
        found = usual(config)
        if (config.arm, config.seed) == ("muon", 1):
            return windowed({"muon": scaled(PTB["go-muon"], 0.999)})(config)
        return found

    found, why = verdict(tmp_path, 4, "ptb", change)
    assert found == "qualified"
    assert "lower in 2 of 3 pairs; 6 of 6 window means within 1 %" in why
    assert "3 pairs alone cannot tell the gain from none" in why


@pytest.mark.parametrize(
    ("go", "muon", "wanted", "words"),
    [
        (290, 2320, "reproduced", "at update 290, Muon at update 2,320, 8.0 times as many"),
        (390, None, "reproduced", "Muon not within 5,000 updates"),
        (410, None, "qualified", "Go-MUON at update 410"),
        (300, 1410, "qualified", "4.7 times as many"),
        (300, 300, "not reproduced", "1.0 times as many"),
        (None, 300, "not reproduced", "Go-MUON not within 5,000 updates"),
    ],
)
def test_the_grokking_rule(
    tmp_path: Path, go: int | None, muon: int | None, wanted: str, words: str
) -> None:
    steps = {
        arm.name: go if "go-muon" in arm.name else muon for arm in EXPERIMENTS["grokking"].arms
    }
    found, why = verdict(tmp_path, 8, "grokking", grokked(steps))
    assert found == wanted
    assert words in why
    assert "(paper 290 and 2,320); one seed" in why


@pytest.mark.parametrize(
    ("end", "wanted"), [(0.99, "reproduced"), (0.9899, "qualified")], ids=["back", "lost"]
)
def test_a_run_that_does_not_come_back_is_qualified(
    tmp_path: Path, end: float, wanted: str
) -> None:
    steps = {arm.name: 170 if "go" in arm.name else None for arm in EXPERIMENTS["grokking"].arms}
    found, why = verdict(tmp_path, 8, "grokking", grokked(steps, lost=471, end=end))
    assert found == wanted
    assert "Go-MUON is below 99 % at 471 later evaluations" in why
    assert f"; in the end {100 * end:.2f} % with Go-MUON and " in why


def test_the_paper_rates_are_judged_before_the_screen_is_whole(tmp_path: Path) -> None:
    folder = thin_campaign(tmp_path / "grokking", EXPERIMENTS["grokking"])
    judged = [claim.finding(read_evidence(tmp_path)) for claim in claims.ABSTRACT[7:]]
    shutil.rmtree(folder / "runs" / "p107-muon-0.32-s0")
    evidence = read_evidence(tmp_path)
    waiting = ("not run yet", "`grokking`: 7 of 8 runs so far")
    assert claims.FURTHER[3].finding(evidence) == waiting, "the screen needs every run"
    assert [claim.finding(evidence) for claim in claims.ABSTRACT[7:]] == judged
    assert claims.FURTHER[4].finding(evidence)[0] != "not run yet"
    assert sum(len(panel.lines) for panel in picture_data.accuracy_panels(evidence)) == 7
    shutil.rmtree(folder / "runs" / "p107-muon-0.16-s0")
    evidence = read_evidence(tmp_path)
    assert claims.ABSTRACT[7].finding(evidence) == judged[0]
    for claim in (claims.ABSTRACT[8], claims.FURTHER[4]):
        assert claim.finding(evidence) == ("not run yet", "`grokking`: 6 of 8 runs so far")
    assert picture_data.accuracy_panels(evidence) == ()


def test_a_quick_run_of_the_paper_rates_is_not_judged(tmp_path: Path) -> None:
    thin_campaign(tmp_path / "grokking", replace(EXPERIMENTS["grokking"], label="quick"))
    found = claims.ABSTRACT[7].finding(read_evidence(tmp_path))
    assert found == ("not run yet", "`grokking`: only a quick run")


def test_the_screen_and_the_fit(tmp_path: Path) -> None:
    steps = {
        arm.name: 500 if arm.lr in (0.08, 0.32) else 600 for arm in EXPERIMENTS["grokking"].arms
    }
    found, why = verdict(tmp_path, 13, "grokking", grokked(steps))
    assert found == "qualified"
    assert "muon: 0.32 (paper 0.16), sums of grok steps 1,200 at 0.16 and 1,000 at 0.32" in why
    assert "never" not in why
    fit, _ = claims.FURTHER[4].finding(read_evidence(tmp_path))
    assert fit == "reproduced"


def test_the_screen_says_what_it_counts_for_a_run_that_never_groks(tmp_path: Path) -> None:
    never = {"p103-muon-0.16": None, "p103-muon-0.32": None, "p107-muon-0.32": None}
    steps = dict.fromkeys((arm.name for arm in EXPERIMENTS["grokking"].arms), 500) | never
    found, why = verdict(tmp_path, 13, "grokking", grokked(steps))
    assert found == "reproduced"
    assert "sums of grok steps 5,501 at 0.16 and 10,002 at 0.32" in why
    assert why.endswith("a run that never groks counts as 5,001")


@pytest.mark.parametrize(
    ("factors", "wanted"),
    [
        ((0.99, 0.99, 0.99, 0.99), "reproduced"),
        ((0.99, 0.99, 0.99, 1.001), "qualified"),
        ((0.999, 1.001, 1.001, 1.001), "not reproduced"),
    ],
)
def test_the_late_window_rule(tmp_path: Path, factors: tuple[float, ...], wanted: str) -> None:
    control = published.LAZY.windows["refresh-1"]

    def change(config: RunConfig) -> Mapping[str, Any]:
        factor = factors[config.seed] if config.arm == "lazy-4" else 1.0
        windows = {**control, "901-1000": factor * control["901-1000"]}
        return windowed({config.arm: windows})(config)

    found, why = verdict(tmp_path, 6, "lazy", change)
    assert found == wanted
    assert f"lower on {sum(factor < 1 for factor in factors)} of 4 pairs" in why


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [(0.8, "reproduced"), (0.7, "qualified"), (0.9, "qualified"), (1.01, "not reproduced")],
)
def test_the_step_time_rule(tmp_path: Path, ratio: float, wanted: str) -> None:
    folder = thin_campaign(tmp_path / "lazy", EXPERIMENTS["lazy"])
    seconds = [[1.0, 2.0, 1.5], [ratio, 2 * ratio, 1.5 * ratio]]
    edit(folder / "timing.json", seconds=seconds)
    found, why = claims.ABSTRACT[6].finding(read_evidence(tmp_path))
    assert found == wanted
    assert f"takes {ratio:.3f}× the time" in why
    (folder / "timing.json").unlink()
    assert claims.ABSTRACT[6].finding(read_evidence(tmp_path))[0] == "not run yet"


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [((0, 0), "reproduced"), ((0, 3), "qualified"), ((1, 0), "not reproduced")],
)
def test_the_alignment_rule(tmp_path: Path, counts: tuple[int, int], wanted: str) -> None:
    names = ("negative_source", "negative_gradient")
    change: Change = lambda config: dict(zip(names, counts, strict=True))  # noqa: E731
    assert verdict(tmp_path, 11, "lazy", change)[0] == wanted


def test_the_tests_that_hold_theory_exist() -> None:
    held = [test for claim in claims.ABSTRACT for test in claim.tests]
    assert len(held) == 8
    for test in held:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_theory_with_other_figures_is_not_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert claims.ABSTRACT[2].finding({})[0] == "reproduced"
    monkeypatch.setattr(claims, "SPARSE", ("3.99537", "32.3714", "32.0000"))
    assert claims.ABSTRACT[2].finding({})[0] == "not reproduced"
