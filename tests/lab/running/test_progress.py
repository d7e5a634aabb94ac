"""The live and the plain display show the same facts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from gomuon.lab.experiments import racing
from gomuon.lab.running import progress
from gomuon.lab.running.progress import LiveDisplay, PlainDisplay
from gomuon.lab.running.training import UpdateReport


@pytest.mark.parametrize("task", ["grokking", "ptb"])
def test_sixty_columns_are_enough(task: str) -> None:
    """No column of a live line is cut off, and no line is broken."""
    plan = racing.race_plan(task, "newton-muon,adamw", steps=1000, seeds="17402")
    config = plan.config(plan.arms[0], 17402, 0.08)
    accuracies = {"train_accuracy": 0.5, "test_accuracy": 0.125} if task == "grokking" else {}
    console = Console(force_terminal=True, width=60, file=io.StringIO())
    shown = progress.open_display(plan, console)
    assert isinstance(shown, LiveDisplay)
    shown.begin(config)
    shown.update(config, UpdateReport(400, 100.0, {"loss": 1.23456, **accuracies}))
    with console.capture() as captured:
        console.print(shown.progress.get_renderable())
    lines = Text.from_ansi(captured.get()).plain.splitlines()
    assert len(lines) == 2  # all runs, and this one
    assert all(len(line) <= 60 for line in lines)
    assert "…" not in "".join(lines)
    figure = "held out 12%" if accuracies else "loss 1.235"
    for part in ("newton-muon-s17402", "400/1000", figure, "16 h 40 min"):
        assert part in lines[1], lines[1]
    assert "0/2 runs" in lines[0]


def test_live_and_plain_displays_show_the_same_facts() -> None:
    plan = racing.race_plan("grokking", "go-muon,adamw", steps=100, seeds="0")
    config = plan.config(plan.arms[0], 0, 0.08)
    metrics = {"step": 40, "loss": 1.23456, "train_accuracy": 0.5, "test_accuracy": 0.125}
    for kind, terminal in ((PlainDisplay, False), (LiveDisplay, True)):
        console = Console(record=True, force_terminal=terminal, width=120, file=io.StringIO())
        shown = progress.open_display(plan, console)
        assert type(shown) is kind
        with shown:
            shown.skip(plan.config(plan.arms[1], 0, 0.01))
            shown.begin(config)
            shown.update(config, UpdateReport(40, 0.5, metrics))
            assert shown.pace.left == 60
            assert shown.pace.seconds_left() is not None
            shown.finish(config)
        text = console.export_text()
        assert "go-muon-s0" in text
        assert "loss 1.2346  train 50.0%  held out 12.5%" in text
        assert "finished before" in text
        assert shown.pace.finished == 2
