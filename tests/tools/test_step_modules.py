"""A step passes through few modules."""

from tools.step_modules import count


def test_a_refresh_step_passes_through_at_most_23_modules() -> None:
    entered = count()
    assert {"step.py", "optimizer.py", "geometry/captured.py", "functional/oracle.py"} <= set(
        entered
    )
    assert len(entered) <= 23, sorted(entered)
