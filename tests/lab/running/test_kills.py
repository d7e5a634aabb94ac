"""Fifty kills at random moments lose nothing and change nothing."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.plan import Arm
from gomuon.lab.results.runs import METRICS, is_finished
from gomuon.lab.running.execution import RUNS, run_campaign
from tests.lab.helpers.tiny_runs import Silent, addition_plan, forking

KILLS = 50
LONGEST = 0.25  # seconds until a kill
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


def children_of(pid: int) -> list[int]:
    """The workers, where there is a /proc to find them in."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def kill(process: Any, random_: random.Random) -> None:
    """Kill -9 for the campaign, for one of its workers, or for all of them at once."""
    workers = children_of(process.pid)
    victim = random_.choice(["campaign", "worker", "all"]) if workers else "campaign"
    if victim == "worker":
        os.kill(random_.choice(workers), signal.SIGKILL)
        process.join(30)
        assert process.exitcode in (0, 3), "the campaign did not notice its worker's death"
        return
    if victim == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        os.kill(process.pid, signal.SIGKILL)
    process.join(30)


def wait_or_kill(process: Any, random_: random.Random) -> bool:
    """Whether the campaign was killed before it was done."""
    # The process group exists only once the process has made it.
    deadline = time.monotonic() + 30
    while process.is_alive() and time.monotonic() < deadline:
        try:
            if os.getpgid(process.pid) == process.pid:
                break
        except ProcessLookupError:
            break
        time.sleep(0.001)
    process.join(random_.uniform(0, LONGEST))
    if not process.is_alive():
        assert process.exitcode == 0
        return False
    try:
        kill(process, random_)
    except ProcessLookupError:
        return False  # it was quicker
    return True


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
