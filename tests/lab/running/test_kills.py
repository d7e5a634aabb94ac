"""Fifty kills at random moments lose nothing and change nothing."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.plan import Arm
from gomuon.lab.results.runs import METRICS, is_finished
from gomuon.lab.running.execution import RUNS, run_campaign
from tests.lab.helpers.killing import wait_or_kill
from tests.lab.helpers.tiny_runs import Silent, addition_plan, forking

KILLS = 50
PLAN = addition_plan(
    arms=(
        Arm("go-muon", "Go-MUON", "go-muon", 0.08),
        Arm("adamw", "AdamW", "adamw", 0.01),
    ),
    seeds=(0, 1),
    steps=80,
)


def carry_out(folder: Path) -> None:
    """A campaign in a process group of its own, with workers forked from it."""
    os.setsid()
    try:
        run_campaign(PLAN, folder, jobs=2, observer=Silent(), method="fork")
    except LabError as error:
        # A worker of this campaign was killed: it must say so and stop, not hang or go on.
        sys.exit(3 if "the process of run" in str(error) else 4)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob(f"{RUNS}/*/{METRICS}")}


def test_fifty_kills_lose_nothing_and_change_nothing(tmp_path: Path) -> None:
    context = forking()
    run_campaign(PLAN, tmp_path / "undisturbed", jobs=2, observer=Silent())
    expected = contents(tmp_path / "undisturbed")
    assert sorted(expected) == ["adamw-s0", "adamw-s1", "go-muon-s0", "go-muon-s1"]

    random_ = random.Random(0)
    kills = in_flight = 0
    folder, campaigns = tmp_path / "killed-0", 1
    while True:
        process = context.Process(target=carry_out, args=(folder,))
        process.start()
        if kills < KILLS and wait_or_kill(process, random_):
            kills += 1
            begun = [p for p in folder.glob(f"{RUNS}/*") if (p / METRICS).exists()]
            in_flight += any(not is_finished(run) for run in begun)
            continue
        process.join(60)
        assert process.exitcode == 0
        assert contents(folder) == expected
        if kills == KILLS:
            break
        # It finished before the last kill: kill the next one.
        folder, campaigns = tmp_path / f"killed-{campaigns}", campaigns + 1
    assert in_flight >= KILLS // 4, "too few kills hit a run in flight to prove anything"
    assert not list(tmp_path.glob(f"*/{RUNS}/*/.*.part"))
