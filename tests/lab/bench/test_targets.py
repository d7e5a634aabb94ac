"""Targets: which ratio is compared with which limit, and the verdict."""

from __future__ import annotations

import math

import pytest

from gomuon.lab.bench import bench_tables, targets
from gomuon.lab.bench.all_arms import arms_by_name
from gomuon.lab.bench.workloads import NAMES
from tests.lab.helpers.made_bench import made_result

# Every line of the table the benchmark is held to.
LINES = [
    (1, "paper", "step", "go-muon-4", "torch-muon", 0.10),
    (2, "paper", "step", "go-muon-4", targets.UNIT, 0.50),
    (3, "paper", "whole", "go-muon-4", "go-muon-1", 0.80),
    (3, "paper", "whole", "go-muon-1", "plain-go-muon-1", 0.60),
    (4, "paper", "step", "muon", "newton-schulz", 1.5),
    (5, "wide", "step", "go-muon-4", "muon", 2.0),
    (5, "wide", "step", "go-muon-16", "muon", 1.3),
    (5, "mlp", "step", "go-muon-4", "muon", 2.0),
    (5, "mlp", "step", "go-muon-16", "muon", 1.3),
    (6, targets.HOOKS, "peak", "go-muon-4", "without", 1.01),
    (7, "overhead", "step", "muon", "adamw", 8.0),
    (7, "overhead", "step", "go-muon-4", "adamw", 8.0),
]


def test_the_bars_are_these() -> None:
    found = [(b.number, b.workload, b.quantity, b.arm, b.other, b.most) for b in targets.TARGETS]
    assert found == LINES
    known = {*arms_by_name(), targets.UNIT, "without"}
    assert all({b.arm, b.other} <= known for b in targets.TARGETS)
    assert all(b.workload in (*NAMES, targets.HOOKS) for b in targets.TARGETS)


def test_each_line_reads_the_quantity_it_names() -> None:
    seconds = {"go_muon_4": 0.4, "go_muon_1": 0.9, "torch_muon": 5.0, "plain_go_muon_1": 2.0}
    result = made_result(paper={**seconds, "muon": 0.2, "newton_schulz": 0.1})
    result["memory"] = {"hooks": {"ratio": 1.02}}
    readings = targets.check(result)
    ratios = [None if r.ratio is None else round(r.ratio, 6) for r in readings]
    assert ratios[:5] == [0.08, 0.4, round(1.4 / 1.9, 6), round(1.9 / 3.0, 6), 2.0]
    verdicts = [r.verdict for r in readings]
    assert verdicts[:5] == ["pass", "pass", "pass", "miss", "miss"]
    assert verdicts[5:9] == ["not measured"] * 4
    assert verdicts[9:] == ["miss", "not measured", "not measured"]
    assert readings[0].error == pytest.approx(0.08 * math.hypot(0.1, 0.1))


def test_a_quick_run_gives_no_verdict() -> None:
    result = made_result("quick", paper={"go_muon_4": 0.1, "torch_muon": 9.0})
    assert [r.verdict for r in targets.check(result)][:2] == ["quick", "quick"]


def test_an_arm_that_failed_is_not_measured() -> None:
    result = made_result(paper={"go_muon_4": 0.1, "torch_muon": 9.0})
    entry = result["workloads"]["paper"]["arms"]["torch-muon"]
    del entry["step"]
    entry["failed"] = "made up"
    assert targets.check(result)[0].verdict == "not measured"
    rows = bench_tables.workload_table(result, "paper").rows
    assert ("torch Muon", "1", "made up") in rows


def test_rows_are_ratios() -> None:
    result = made_result(paper={"go_muon_4": 0.5})
    title, interval, step, whole, state, peak = bench_tables.workload_table(result, "paper").rows[1]
    assert (title, interval) == ("Go-MUON, K = 4", "4")
    assert step == "0.500 ± 0.071"
    assert whole == "1.50 ± 0.21"
    assert (state, peak) == ("3.00", "1.50")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_numbers_have_no_exponents(value: float, shown: str) -> None:
    assert bench_tables.number(value) == shown


def test_bar_arms_never_sit_out() -> None:
    assert targets.arms_of("wide") == {"go-muon-4", "go-muon-16", "muon", "adamw"}
