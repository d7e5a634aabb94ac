"""Windows, means, intervals and the grokking rule, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from gomuon.lab.experiments.loss_windows import LossWindow, windows_for
from gomuon.lab.results import statistics as st


def test_the_papers_windows_count_from_one_and_include_both_ends() -> None:
    losses = [float(step) for step in range(1, 1001)]
    means = st.window_means(losses, windows_for(1000))
    assert means == {"201-300": 250.5, "501-600": 550.5, "901-1000": 950.5}


@pytest.mark.parametrize(
    ("steps", "windows"),
    [
        (100, ((21, 30), (51, 60), (91, 100))),
        (2000, ((401, 600), (1001, 1200), (1801, 2000))),
        (3, ((1, 1), (2, 2), (3, 3))),
        (1, ((1, 1), (1, 1), (1, 1))),
    ],
)
def test_windows_scale_with_the_run(steps: int, windows: tuple[LossWindow, ...]) -> None:
    assert windows_for(steps) == windows
    st.window_means([1.0] * steps, windows)


def test_a_window_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="5-9"):
        st.window_means([1.0] * 8, [(5, 9)])


def test_geometric_mean_of_the_papers_ptb_row() -> None:
    assert st.geometric_mean([1.46773, 1.28084, 1.17560]) == pytest.approx(1.30257, abs=5e-6)
    assert st.geometric_mean([1.45689, 1.28167, 1.17000]) == pytest.approx(1.29757, abs=5e-6)
    assert st.geometric_mean([0.0, 2.0]) == 0.0
    assert math.isnan(st.geometric_mean([math.nan, 1.0]))
    with pytest.raises(ValueError, match="no values"):
        st.geometric_mean([])


# Two-sided 95 % points of Student's t, from any printed table.
@pytest.mark.parametrize(
    ("freedom", "point"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)],
)
def test_student_t_points_match_the_table(freedom: int, point: float) -> None:
    assert st.student_t_quantile(0.975, freedom) == pytest.approx(point, abs=1e-4)


def test_paired_difference_by_hand() -> None:
    result = st.paired([2.0, 3.0, 4.0], [1.0, 3.5, 2.0])
    assert result.differences == (-1.0, 0.5, -2.0)
    assert result.mean == pytest.approx(-2.5 / 3)
    deviation = math.sqrt(((-1 + 2.5 / 3) ** 2 + (0.5 + 2.5 / 3) ** 2 + (-2 + 2.5 / 3) ** 2) / 2)
    half = 4.302653 * deviation / math.sqrt(3)
    assert result.low == pytest.approx(-2.5 / 3 - half, abs=1e-5)
    assert result.high == pytest.approx(-2.5 / 3 + half, abs=1e-5)
    assert result.relative == pytest.approx(-2.5 / 9)
    assert result.wins == 2


def test_one_pair_has_a_difference_but_no_interval() -> None:
    result = st.paired([2.0], [1.5])
    assert result.mean == -0.5
    assert math.isnan(result.low)
    assert math.isnan(result.high)
    with pytest.raises(ValueError, match="cannot pair"):
        st.paired([1.0, 2.0], [1.0])


def evaluations(*accuracies: float) -> list[tuple[int, float]]:
    return [(10 * i, accuracy) for i, accuracy in enumerate(accuracies, start=1)]


def test_grok_step_is_the_first_of_five_in_a_row() -> None:
    assert st.grok_step(evaluations(0.5, 1, 1, 1, 1, 0.98, 1, 1, 0.99, 1, 1, 1)) == 70
    assert st.grok_step(evaluations(1, 1, 1, 1)) is None
    assert st.grok_step(evaluations(1, 1, 1, 1, 1)) == 10
    assert st.grok_step([]) is None


def test_retention_failures_come_after_the_grok_step_only() -> None:
    points = evaluations(0.2, 1, 1, 1, 1, 1, 0.97, 1, 0.5)
    assert st.retention_failures(points, 20) == [70, 90]
    assert st.retention_failures(points, None) == []


def test_grokking_result_from_metrics() -> None:
    metrics = [
        {"step": step, "loss": 1.0 / step, "train_accuracy": 1.0 if step >= 12 else 0.5}
        | ({"test_accuracy": 0.995 if step >= 20 else 0.1} if step % 10 == 0 else {})
        for step in range(1, 71)
    ]
    result = st.grokking_result(metrics)
    assert result["grok_step"] == 20
    assert result["train_99_step"] == 12
    assert result["delay"] == 8
    assert result["retention_failures"] == []
    assert result["final_test_accuracy"] == 0.995


def test_a_diverged_language_run_has_no_mean_it_did_not_earn() -> None:
    metrics = [{"step": step, "loss": 2.0} for step in range(1, 41)]
    result = st.language_result(metrics, windows_for(100))
    assert result["windows"] == {"21-30": 2.0, "51-60": None, "91-100": None}
    assert result["geometric_mean"] is None
    assert result["final_loss"] == 2.0


def test_times_are_compared_cycle_by_cycle_or_in_the_mean() -> None:
    ratio = st.compare_times([1.0, 2.0], [2.0, 1.0])
    assert ratio.mean == pytest.approx(1.0)
    assert ratio.cycles == 2
    assert ratio.spread == pytest.approx(math.exp(math.sqrt(2) * math.log(2)))
    uneven = st.compare_times([1.0, 3.0], [1.0, 1.0, 4.0])
    assert uneven.mean == pytest.approx(1.0)
    assert uneven.spread is None
    assert uneven.cycles == 2
