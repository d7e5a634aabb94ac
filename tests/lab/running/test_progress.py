"""The live and the plain display show the same facts."""

from __future__ import annotations

import io

from rich.console import Console

from gomuon.lab.experiments import racing
from gomuon.lab.running import progress
from gomuon.lab.running.progress import LiveDisplay, PlainDisplay
from gomuon.lab.running.training import UpdateReport


def test_live_and_plain_displays_show_the_same_facts() -> None:
    plan = racing.race_plan("grokking", "go-muon,adamw", steps=100)
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
