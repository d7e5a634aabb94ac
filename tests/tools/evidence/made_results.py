"""Results folders with made numbers, for testing what reads them. Nothing here was trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.experiments import catalogue, racing, tuning
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.optimizers import COUNTED
from gomuon.lab.experiments.plan import Arm, Plan, run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.experiments.selection import read_selection
from gomuon.lab.results.candidates import picks_of, write_selection
from gomuon.lab.results.runs import Run, file_sha256, load_run
from gomuon.lab.results.statistics import geometric_mean, grokking_result, language_result
from tests.lab.helpers.made_campaigns import (
    MACHINE,
    VERSIONS,
    accuracies,
    digest,
    losses,
    write_campaign,
)
from tools.evidence.command import main
from tools.evidence.results_folder import read_evidence
from tools.evidence.thinned_curve import thin, write_curve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
METHODS = "go-muon,muon,adamw,go-muon-input"
Change = Callable[[RunConfig], Mapping[str, Any]]


def outcome(config: RunConfig, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The result.json that training would have written."""
    grokking = config.task == "grokking"
    found = (
        grokking_result(metrics)
        if grokking
        else language_result(metrics, windows_for(config.steps))
    )
    result = {"steps": len(metrics), **found}
    for name in COUNTED:
        if name in metrics[-1]:
            result[name] = metrics[-1][name]
    return result


def full_campaign(folder: Path, plan: Plan) -> Path:
    """A campaign as `gomuon` leaves it, with its metrics."""
    write_campaign(folder, plan)
    for path in (folder / "runs").iterdir():
        run = load_run(path)
        result = outcome(run.config, run.metrics)
        result["metrics_sha256"] = file_sha256(path / "metrics.jsonl")
        (path / "result.json").write_text(json.dumps(result))
        edit(path / "manifest.json", commit=COMMIT)
    return folder


def thin_campaign(
    folder: Path,
    plan: Plan,
    change: Change | None = None,
    rates: Mapping[str, float] | None = None,
    argv: Sequence[str] | None = None,
) -> Path:
    """A campaign as it is kept; runs that `change` gives other outcomes have no curve."""
    folder.mkdir(parents=True)
    command = ["reproduce", plan.experiment] if argv is None else list(argv)
    (folder / "plan.json").write_text(json.dumps({**plan.declaration(), "argv": command}))
    chosen = {arm.name: arm.grid[0] for arm in plan.arms if arm.lr is None} | dict(rates or {})
    for config in (*plan.tuning_configs(), *plan.main_configs(chosen)):
        metrics = accuracies(config) if config.task == "grokking" else losses(config)
        place = folder / "runs" / run_name(config)
        place.mkdir(parents=True)
        changed = {} if change is None else change(config)
        result = {**outcome(config, metrics), **changed}
        if not changed:
            write_curve(place, thin(metrics, config))
        (place / "result.json").write_text(json.dumps(result))
        shared = (config.task, config.modulus, config.steps, config.width)
        manifest = {
            "format": 1,
            "config": config.as_dict(),
            "hashes": {
                name: digest(name, config.seed, *shared)
                for name in ("corpus", "model", "schedule", "stream", "parameters")
            },
            "versions": VERSIONS,
            "machine": MACHINE,
            "commit": COMMIT,
        }
        (place / "manifest.json").write_text(json.dumps(manifest))
    if plan.timing:
        seconds = [[0.2 * (1 + i), 0.21 * (1 + i)] for i in range(len(plan.timing))]
        timing = {"arms": list(plan.timing), "seconds": seconds, "unit": "whole step"}
        (folder / "timing.json").write_text(json.dumps(timing))
    return folder


def windowed(values: Mapping[str, Mapping[str, float]]) -> Change:
    """Outcomes with these window means by arm, all seeds alike but for a tiny shift."""

    def change(config: RunConfig) -> Mapping[str, Any]:
        means = {name: mean + 1e-5 * config.seed for name, mean in values[config.arm].items()}
        return {"windows": means, "geometric_mean": geometric_mean(list(means.values()))}

    return change


def grokked(steps: Mapping[str, int | None], lost: int = 0, end: float = 1.0) -> Change:
    """Outcomes with these grok steps by arm; every run fits its training pairs at update 60.

    Afterwards `lost` evaluations are below 99 %, and `end` of the held-out pairs right at the last.
    """

    def change(config: RunConfig) -> Mapping[str, Any]:
        step = steps[config.arm]
        delay = None if step is None else step - 60
        found = {"grok_step": step, "train_99_step": 60, "delay": delay}
        failures = [] if step is None else [step + 100 + 10 * i for i in range(lost)]
        return {**found, "retention_failures": failures, "final_test_accuracy": end}

    return change


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which `python -m tools.evidence` refuses these words."""
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sweep(results: Path, task: str, **options: Any) -> Plan:
    """A sweep in results/tune-TASK with its selection.json."""
    plan = tuning.tune_plan(task, METHODS, grid=3, seeds="100", **options)
    folder = thin_campaign(results / f"tune-{task}", plan, argv=["tune", "--task", task])
    study = read_evidence(results)[f"tune-{task}"]
    runs: list[Run] = []
    for run in study.runs:  # picking reads metrics, which are made again
        made = accuracies(run.config) if task == "grokking" else losses(run.config)
        runs.append(Run(**{**run.__dict__, "metrics": made}))
    write_selection(folder, plan, picks_of(plan, runs))
    return plan


def race(results: Path, task: str, **options: Any) -> Plan:
    """A race in results/race-TASK at the rates of its sweep, with all arms timed."""
    path = results / f"tune-{task}" / "selection.json"
    plan = racing.race_plan(
        task, METHODS, selection=read_selection(path), seeds="101-103", timing=True, **options
    )
    chosen = ["--selection", f"results/tune-{task}/selection.json", "--seeds", "101-103"]
    thin_campaign(results / f"race-{task}", plan, argv=["race", *chosen])
    return plan


def everything(results: Path) -> Path:
    """Every campaign the page knows, whole."""
    for name in catalogue.EXPERIMENTS:
        thin_campaign(results / name, catalogue.EXPERIMENTS[name])
    for name in catalogue.OPEN_QUESTIONS:
        thin_campaign(results / name, catalogue.OPEN_QUESTIONS[name])
    for task, steps in (("ptb", 200), ("shakespeare", 200), ("grokking", 300)):
        sweep(results, task, steps=steps)
        race(results, task, steps=5 * steps if task != "grokking" else 600)
    return results


def small_plan(**changes: Any) -> Plan:
    """The experiment `ptb` on one seed, for what needs no more."""
    facts: dict[str, Any] = {
        **catalogue.EXPERIMENTS["ptb"].__dict__,
        "seeds": (0,),
        "arms": (Arm("muon", "Muon", "muon", 0.02), Arm("go-muon", "Go-MUON", "go-muon", 0.08)),
    }
    return Plan(**facts | changes)
