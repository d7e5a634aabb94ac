"""Carry out a plan in a folder: write it down, tune, train, select, time; skip finished runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gomuon.lab.data import corpora
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, own_code, tasks
from gomuon.lab.experiments.plan import Plan, run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.experiments.selection import FILE as SELECTION
from gomuon.lab.files import (
    locked,
    make_folder,
    read_json,
    refuse_links,
    remove_leftovers,
    write_json,
)
from gomuon.lab.input_checks import errors_naming, is_file, require_whole
from gomuon.lab.results.candidates import screen, tuned_picks, write_selection
from gomuon.lab.results.runs import Run, is_finished, load_run
from gomuon.lab.running.timing import time_interleaved
from gomuon.lab.running.trials import try_arms
from gomuon.lab.running.workers import RunObserver, run_all

PLAN, RUNS, TIMING = "plan.json", "runs", "timing.json"
WRITTEN = (PLAN, RUNS, SELECTION, TIMING, "report.md", "report.html")
TIMING_CYCLES = {"full": 25, "quick": 4}
FEWER_CYCLES = {"full": 3, "quick": 2}  # for more than two arms, whose common cycle is longer


def run_campaign(
    plan: Plan,
    folder: str | Path,
    *,
    jobs: int = 1,
    observer: RunObserver,
    data_dir: str | Path | None = None,
    method: str | None = None,
    argv: Sequence[str] | None = None,
) -> list[Run]:
    """Run everything the plan declares that is not finished yet.

    Args:
        plan: what to run; a folder with another plan is refused.
        folder: the campaign folder.
        jobs: runs at the same time; the results do not depend on it.
        observer: is told about the progress of every run.
        data_dir: where the corpora are.
        method: how processes start; default: a fork server.
        argv: the words of the command that started it, recorded in ``plan.json``.

    Returns:
        The plan's runs, tuning runs first.
    """
    require_whole("--jobs", jobs)
    folder = Path(folder)
    check(plan, data_dir)
    make_folder(folder)
    with locked(folder):
        refuse_links(*(folder / name for name in WRITTEN))
        remove_leftovers(folder)
        declare(plan, folder, argv)

        def carry_out(configs: list[RunConfig]) -> None:
            pending = []
            for config in configs:
                refuse_links(folder / RUNS / run_name(config))
                if is_finished(folder / RUNS / run_name(config)):
                    observer.skip(config)
                else:
                    pending.append(config)
            run_all(
                pending,
                folder / RUNS,
                jobs=jobs,
                observer=observer,
                data_dir=data_dir,
                method=method,
            )

        def load(configs: list[RunConfig]) -> list[Run]:
            return [load_run(folder / RUNS / run_name(config)) for config in configs]

        tuning = plan.tuning_configs()
        carry_out(tuning)
        with errors_naming(folder):
            main = plan.main_configs(select_rates(plan, load(tuning)))
        carry_out(main)
        with errors_naming(folder):
            runs = load([*tuning, *main])
            record_selection(plan, folder, runs)
        measure_timing(plan, folder, data_dir, observer.note)
        return runs


def check(plan: Plan, data_dir: str | Path | None) -> None:
    """Refuse wrong names, wrong numbers and a missing corpus before anything is written."""
    tasks.check_name(plan.task)
    for arm in plan.arms:
        optimizers.check_name(arm.optimizer)
    tuned = [arm.optimizer for arm in plan.arms if arm.grid]
    if len(set(tuned)) < len(tuned):
        raise LabError(
            f"{plan.experiment} tunes one optimizer in two arms ({', '.join(tuned)}); "
            f"{SELECTION} has one entry per optimizer, so remove the grid of all but one of them"
        )
    config = plan.config(plan.arms[0], plan.seeds[0], plan.arms[0].lr or plan.arms[0].grid[0])
    if config.task in tasks.CORPUS:
        # Downloaded once here, before the workers need it.
        corpora.load(tasks.CORPUS[config.task], data_dir)
    short = dataclasses.replace(config, steps=1)
    tasks.build_model(tasks.build(short, data_dir))
    if plan.paper is None:
        try_arms(plan, data_dir)


def declare(plan: Plan, folder: Path, argv: Sequence[str] | None = None) -> None:
    """Write the plan before anything runs; a continued campaign must have the same plan.

    The command is recorded and not compared: another command may continue the same plan.
    """
    path, wanted = folder / PLAN, plan.declaration()
    if not path.exists():
        if any(folder.glob(f"{RUNS}/*")):
            raise LabError(f"{folder} has runs but no {PLAN}; choose another folder with --out")
        write_json(path, wanted if argv is None else {**wanted, "argv": list(argv)})
        return
    recorded = read_json(path)
    own_code.require_same(recorded.get("own"), wanted.pop("own", {}), folder)
    for field in wanted:
        if recorded.get(field) != wanted[field]:
            was, now = _difference(recorded.get(field), wanted[field])
            raise LabError(
                f"{folder} has another plan; {field} there: {was}, here: {now}; "
                "choose another folder with --out"
            )


def _difference(recorded: Any, wanted: Any) -> tuple[str, str]:
    """The two values as text, reduced to the first list entry and the keys that differ."""
    if isinstance(recorded, list) and isinstance(wanted, list) and len(recorded) == len(wanted):
        recorded, wanted = next((a, b) for a, b in zip(recorded, wanted, strict=True) if a != b)
    if isinstance(recorded, Mapping) and isinstance(wanted, Mapping):
        keys = [k for k in {**recorded, **wanted} if recorded.get(k) != wanted.get(k)]
        recorded, wanted = ({k: v.get(k) for k in keys} for v in (recorded, wanted))
    return repr(recorded), repr(wanted)


def select_rates(plan: Plan, tuning: Sequence[Run]) -> dict[str, float]:
    """For each arm without a rate, the rate of its grid with the best statistic."""
    picks = {pick.method: pick for pick in tuned_picks(plan, tuning)}
    # If every rate diverged, the first one: its runs then show it.
    return {
        arm.name: picks[arm.optimizer].rate or arm.grid[0] for arm in plan.arms if arm.lr is None
    }


def record_selection(plan: Plan, folder: Path, runs: Sequence[Run]) -> None:
    """Write ``selection.json`` if the plan tries several rates."""
    if plan.task == "grokking" and plan.paper is not None:
        picks = screen(runs)
    else:
        picks = tuned_picks(plan, runs)
    if picks:
        write_selection(folder, plan, picks)


def measure_timing(
    plan: Plan, folder: Path, data_dir: str | Path | None, say: Callable[[str], None]
) -> None:
    """Measure the step times that the plan asks for, once, while nothing else runs."""
    if not plan.timing or (folder / TIMING).exists():
        return
    arms = {arm.name: arm for arm in plan.arms}
    configs = [
        plan.config(arms[name], plan.seeds[0], arms[name].lr or arms[name].grid[0])
        for name in plan.timing
    ]
    cycles = TIMING_CYCLES[plan.label] if len(configs) == 2 else FEWER_CYCLES[plan.label]
    found = time_interleaved(configs, cycles=cycles, data_dir=data_dir, say=say)
    if found["arms"]:
        write_json(folder / TIMING, found)


def recorded_threads(folder: str | Path) -> int | None:
    """The threads of an existing campaign, so that --threads need not be repeated."""
    path = Path(folder) / PLAN
    if not is_file(path):
        return None
    threads = read_json(path).get("threads")
    return threads if type(threads) is int else None
