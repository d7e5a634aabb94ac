"""A race with an optimizer and a task from files outside the package, killed at random moments."""

from __future__ import annotations

import functools
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import racing
from gomuon.lab.experiments.plan import Plan, adapt
from gomuon.lab.results.runs import METRICS, is_finished
from gomuon.lab.running.execution import RUNS, run_campaign
from tests.lab.helpers.killing import wait_or_kill
from tests.lab.helpers.tiny_runs import Silent, forking
from tests.versions import HAS_MUON

EXAMPLES = Path(__file__).parents[3] / "examples"
KILLS = 12


@functools.cache
def race_plan() -> Plan:
    others = ",torch.optim:Muon" if HAS_MUON else ""
    plan = racing.race_plan(
        "killed_task.py:Checkerboard",
        f"killed_optimizer.py:SignMomentum,go-muon{others}",
        seeds="0,1",
        steps=120,
    )
    return adapt(plan, threads=1)


def carry_out(folder: Path) -> None:
    """A campaign in a process group of its own, with workers forked from it."""
    os.setsid()
    os.chdir(folder.parent)
    try:
        run_campaign(race_plan(), folder, jobs=2, observer=Silent(), method="fork")
    except LabError as error:
        # A worker of this campaign was killed: it must say so and stop, not hang or go on.
        sys.exit(3 if "the process of run" in str(error) else 4)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob(f"{RUNS}/*/{METRICS}")}


def test_a_killed_race_of_ones_own_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under names of their own: a process imports a name once.
    shutil.copy(EXAMPLES / "own_task.py", tmp_path / "killed_task.py")
    shutil.copy(EXAMPLES / "own_optimizer.py", tmp_path / "killed_optimizer.py")
    monkeypatch.chdir(tmp_path)
    # With workers of the usual kind, which must find the files themselves.
    run_campaign(race_plan(), tmp_path / "undisturbed", jobs=2, observer=Silent())
    expected = contents(tmp_path / "undisturbed")
    assert len(expected) == 2 * len(race_plan().arms)
    assert "killed_optimizer-SignMomentum-s1" in expected

    context, random_ = forking(), random.Random(0)
    kills = in_flight = 0
    folder, campaigns = tmp_path / "killed-0", 1
    while True:
        process = context.Process(target=carry_out, args=(folder,))
        process.start()
        if kills < KILLS and wait_or_kill(process, random_, longest=2.0):
            kills += 1
            begun = [p for p in folder.glob(f"{RUNS}/*") if (p / METRICS).exists()]
            in_flight += any(not is_finished(run) for run in begun)
            continue
        process.join(120)
        assert process.exitcode == 0
        assert contents(folder) == expected
        if kills == KILLS:
            break
        # It finished before the last kill: kill the next one.
        folder, campaigns = tmp_path / f"killed-{campaigns}", campaigns + 1
    assert in_flight >= KILLS // 4, "too few kills hit a run in flight to prove anything"
    assert not list(tmp_path.glob(f"*/{RUNS}/*/.*.part"))
