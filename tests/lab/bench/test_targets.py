"""Targets: which ratio is compared with which limit, and the verdict."""

from __future__ import annotations

import math

import pytest

from gomuon.lab.bench import bench_tables, targets
from gomuon.lab.bench.all_arms import arms_by_name
from gomuon.lab.bench.workloads import NAMES
from tests.lab.helpers.made_bench import made_result

# Every line of the table the benchmark is held to.
YARDSTICK = "newton-schulz"
LINES = [
    (1, "paper", "whole", "go-muon-fast", YARDSTICK, 1.18),
    (2, "paper", "whole", "go-muon-4-fast", YARDSTICK, 1.30),
    (3, "paper", "whole", "muon-fast", YARDSTICK, 1.02),
    (3, "paper", "whole", "muon-fast", "torch-muon", 1.0),
    (4, "gpt2", "whole", "go-muon-fast", YARDSTICK, 1.4),
    (4, "wide", "whole", "go-muon-fast", YARDSTICK, 1.4),
    (5, "conv", "whole", "go-muon-fast", YARDSTICK, 1.25),
    (6, "resnet", "whole", "go-muon-4", "adamw", 4.0),
    (7, "mlp-2048", "whole", "go-muon-4", YARDSTICK, 1.4),
    (8, targets.HOOKS, "peak", "go-muon-4", "without", 1.01),
    (9, "overhead", "step", "muon", "adamw", 8.0),
    (9, "overhead", "step", "go-muon-4", "adamw", 8.0),
]


def test_the_bars_are_these() -> None:
    found = [(b.number, b.workload, b.quantity, b.arm, b.other, b.most) for b in targets.TARGETS]
    assert found == LINES
    known = {*arms_by_name(), targets.UNIT, "without"}
    assert all({b.arm, b.other} <= known for b in targets.TARGETS)
    assert all(b.workload in (*NAMES, targets.HOOKS) for b in targets.TARGETS)


def test_each_line_reads_the_quantity_it_names() -> None:
    seconds = {"newton_schulz": 0.2, "torch_muon": 0.25, "muon_fast": 0.19}
    result = made_result(
        paper={**seconds, "go_muon_fast": 0.5, "go_muon_4_fast": 0.6},
        resnet={"go_muon_4": 2.0, "newton_schulz": 1.0},
        overhead={"muon": 0.9},
    )
    result["memory"] = {"hooks": {"ratio": 1.02}}
    result["vectors"] = "AVX512 with bfloat16"
    readings = targets.check(result)
    expected = [1.5 / 1.2, 1.6 / 1.2, 1.19 / 1.2, 1.19 / 1.25, *[None] * 3, 3.0 / 1.1, None, 1.02]
    assert [r.ratio for r in readings] == pytest.approx([*expected, 9.0, None])
    missing = "not measured"
    assert [r.verdict for r in readings] == [
        *("miss", "miss", "pass", "pass", missing, missing, missing, "pass", missing, "miss"),
        *("miss", missing),
    ]
    assert readings[0].error == pytest.approx(1.5 / 1.2 * math.hypot(0.1, 0.1))


def test_without_bfloat16_units_torchs_muon_is_no_bar() -> None:
    result = made_result(paper={"muon_fast": 0.1, "torch_muon": 9.0, "newton_schulz": 0.2})
    verdicts = {r.target.other: r.verdict for r in targets.check(result) if r.ratio is not None}
    assert verdicts == {"torch-muon": "no bfloat16 units", "newton-schulz": "pass"}


def test_a_quick_run_gives_no_verdict() -> None:
    result = made_result("quick", paper={"muon_fast": 0.1, "torch_muon": 9.0})
    assert targets.check(result)[3].verdict == "quick"


def test_an_arm_that_failed_is_not_measured() -> None:
    result = made_result(paper={"muon_fast": 0.1, "torch_muon": 9.0, "go_muon_4": 1.0})
    for name in ("torch-muon", "go-muon-4"):
        entry = result["workloads"]["paper"]["arms"][name]
        del entry["step"]
        entry["failed"] = "made up"
    # It was not even built, so its settings are unknown.
    result["workloads"]["paper"]["arms"]["go-muon-4"]["interval"] = None
    assert targets.check(result)[3].verdict == "not measured"
    rows = bench_tables.workload_table(result, "paper").rows
    assert ("torch Muon", "1", "made up") in rows
    assert ("Go-MUON, K = 4", "–", "made up") in rows


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
    assert targets.arms_of("wide") == {"go-muon-fast", "newton-schulz", "adamw"}
