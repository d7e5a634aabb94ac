"""A campaign of runs killed at random moments and continued is the one that was left alone.

Each case carries out a small campaign in a process of its own, kills it, one of its workers or all
of them a few times, and lets it finish. Metrics, results and final weights must then be those of
an undisturbed campaign, bit for bit.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.plan import Arm, Plan
from gomuon.lab.results.runs import CHECKPOINT, MANIFEST, METRICS, RESULT, TIMING
from gomuon.lab.running.execution import PLAN, RUNS, run_campaign
from tests.lab.helpers.killing import wait_or_kill
from tests.lab.helpers.tiny_runs import ADDITION, Silent, addition_plan, forking

CASES = 200
PAIRS = (("go-muon", "adamw"), ("muon", "shampoo"), ("soap", "kfac"))
PATIENCE = 60.0  # seconds


def plan_of(variant: int) -> Plan:
    """Two methods on two seeds, some milliseconds an update."""
    arms = tuple(Arm(name, name, name, 0.01) for name in PAIRS[variant])
    settings = {**ADDITION, "checkpoint_every": (3, 7, 1)[variant]}
    return addition_plan(arms, seeds=(0, 1), steps=40, settings=settings)


def carry_out(variant: int, folder: Path, jobs: int) -> None:
    """A campaign in a process group of its own, with workers forked from it."""
    os.setsid()
    try:
        run_campaign(plan_of(variant), folder, jobs=jobs, observer=Silent(), method="fork")
    except LabError as error:
        # A worker was killed: the campaign must say so and stop, not hang or go on.
        sys.exit(3 if "the process of run" in str(error) else 4)


@functools.cache
def undisturbed(variant: int) -> dict[str, Any]:
    """What the campaign comes to if nobody kills it; once in every process."""
    folder = Path(tempfile.mkdtemp(prefix="gomuon-kills-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    finish(variant, folder / "whole", jobs=2)
    return outcome(folder / "whole")


def finish(variant: int, folder: Path, jobs: int) -> None:
    process = forking().Process(target=carry_out, args=(variant, folder, jobs))
    process.start()
    process.join(PATIENCE)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the campaign did not finish: exit code {process.exitcode}")


def outcome(folder: Path) -> dict[str, Any]:
    """All that may not depend on how often a campaign was stopped."""
    found: dict[str, Any] = {PLAN: (folder / PLAN).read_bytes()}
    for run in sorted((folder / RUNS).iterdir()):
        manifest = json.loads((run / MANIFEST).read_text())
        state = torch.load(run / CHECKPOINT, weights_only=True)
        found[f"{run.name}/{METRICS}"] = (run / METRICS).read_bytes()
        found[f"{run.name}/{RESULT}"] = (run / RESULT).read_bytes()
        found[f"{run.name}/{MANIFEST}"] = (manifest["config"], manifest["hashes"])
        found[f"{run.name}/{TIMING}, lines"] = (run / TIMING).read_bytes().count(b"\n")
        for part in ("model", "optimizer", "step", "counts"):
            found[f"{run.name}/{CHECKPOINT}, {part}"] = _exact(state[part])
    return found


def _exact(value: Any) -> Any:
    """A state that can be compared with ==: tensors as their dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), content
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, list | tuple) else value


def case(seed: int, folder: Path) -> str | None:
    """One campaign, one to four kills."""
    generator = random.Random(seed)
    variant, jobs = generator.randrange(len(PAIRS)), generator.choice((1, 2))
    expected = undisturbed(variant)
    place, kills = folder / "killed", 0
    for _ in range(generator.randint(1, 4)):
        process = forking().Process(target=carry_out, args=(variant, place, jobs))
        process.start()
        kills += wait_or_kill(process, generator)
    finish(variant, place, jobs)
    found = outcome(place)
    if differing := sorted(key for key in expected if found.get(key) != expected[key]):
        return f"after {kills} kills {', '.join(differing)} differ from the undisturbed campaign's"
    if left := [path.name for path in place.rglob("*.part")]:
        return f"after {kills} kills {left[0]} is left behind"
    return None
