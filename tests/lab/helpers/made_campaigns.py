"""Campaign folders with made curves, for testing what reads them. Nothing here was trained.

The folders have the format that the lab writes; the numbers come from a seeded generator and only
have the shape of real ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.optimizers import refresh_interval
from gomuon.lab.experiments.plan import Arm, Plan, Quick, adapt, run_name
from gomuon.lab.experiments.run_config import HELD_OUT_TASKS, VALIDATION_LOSS, RunConfig

# How much lower (or higher) than the others an optimizer's made loss is, and when it groks.
LEVELS = {"go-muon": 0.992, "muon": 1.0, "halfspace": 1.02, "muon-qk": 1.02, "adamw": 1.08}
GROKS = {"go-muon": 180, "muon": 2300, "adamw": 90_000}
MACHINE = {"system": "Made Linux", "processor": "made processor", "cores": 2, "threads": 1}
VERSIONS = {"gomuon": "0.0", "torch": "2.0", "python": "3.11", "numpy": "2.0"}


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def race(optimizers: tuple[str, ...] = ("go-muon", "muon", "adamw"), **changes: Any) -> Plan:
    rates = {"go-muon": 0.08, "muon": 0.16, "adamw": 0.01}
    plan = Plan(
        experiment="race",
        title="A race on modular addition",
        task="grokking",
        arms=tuple(Arm(name, f"{name} {rates[name]:g}", name, rates[name]) for name in optimizers),
        comparisons=tuple((other, optimizers[0]) for other in optimizers[1:]),
        seeds=(0,),
        steps=400,
        statistic="first of five consecutive held-out evaluations of at least 99 %",
        rule="rates as given",
        quick=Quick(steps=100, seeds=1),
        settings={"modulus": 59, "width": 64, "hidden": 192},
    )
    return dataclasses.replace(plan, **changes)


def experiment(name: str, **changes: Any) -> Plan:
    return dataclasses.replace(EXPERIMENTS[name], **changes)


def short(name: str, **changes: Any) -> Plan:
    """An experiment of the paper in 60 updates, shortened as the command line shortens it."""
    return dataclasses.replace(adapt(EXPERIMENTS[name], steps=60), **changes)


def write_campaign(folder: Path, plan: Plan) -> Path:
    """Write the plan and all its runs, finished."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.declaration()))
    rates = {arm.name: arm.grid[0] for arm in plan.arms if arm.lr is None}
    for config in (*plan.tuning_configs(), *plan.main_configs(rates)):
        write_run(folder / "runs" / run_name(config), config)
    return folder


def write_run(folder: Path, config: RunConfig, made: int | None = None) -> Path:
    """Write one run; with `made` it stops after that many updates and is unfinished."""
    folder.mkdir(parents=True)
    shared = (config.task, config.modulus, config.steps)
    manifest = {
        "format": 1,
        "config": config.as_dict(),
        "hashes": {
            "corpus": digest("corpus", *shared[:2]),
            "model": digest("model", config.width, *shared[:2]),
            "schedule": digest("schedule", *shared),
            "stream": digest("stream", config.seed, *shared),
            "parameters": digest("parameters", config.seed, *shared),
        },
        "versions": VERSIONS,
        "machine": MACHINE,
        "commit": None,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = accuracies(config) if config.task == "grokking" else losses(config)
    lines = lines[:made]
    write_lines(folder / "metrics.jsonl", lines)
    pace = random.Random(repr(("pace", config.arm, config.seed)))
    slow = 1.25 if config.options.get("refresh_every") == 1 else 1.0
    seconds = [{"step": m["step"], "seconds": slow * pace.uniform(0.18, 0.24)} for m in lines]
    write_lines(folder / "timing.jsonl", seconds)
    if made is None:
        (folder / "result.json").write_text(json.dumps({"steps": config.steps}))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def losses(config: RunConfig) -> list[dict[str, Any]]:
    """A curve from ln 50 towards 1.17; paired arms share most of their noise, as real ones do."""
    shared = random.Random(config.seed)
    own = random.Random(repr((config.arm, config.seed)))
    level = LEVELS.get(config.optimizer, 1.0) * (1 + own.gauss(0, 0.0008))
    lines = []
    for step in range(1, config.steps + 1):
        t = 1000 * step / config.steps
        clean = 1.1 + 2.8 * math.exp(-t / 25) + 0.75 * math.exp(-t / 300)
        noise = shared.gauss(0, 0.035) + own.gauss(0, 0.008)
        line: dict[str, Any] = {"step": step, "loss": level * clean + noise}
        if config.telemetry:
            line |= counts(config, step)
        if config.task in HELD_OUT_TASKS and step == config.steps:
            line[VALIDATION_LOSS] = level * 1.4 + noise
        lines.append(line)
    return lines


def counts(config: RunConfig, step: int) -> dict[str, int]:
    """What a run with telemetry counts until a step: all of them only grow."""
    every = refresh_interval(config.optimizer, config.options)
    opposed = {"negative_source": 0, "negative_gradient": step // 400}
    return {**opposed, "refreshes": 7 * ((step - 1) // every + 1)}


def accuracies(config: RunConfig) -> list[dict[str, Any]]:
    """Training accuracy rises at about 60 updates, held-out accuracy at the optimizer's time."""
    own = random.Random(repr((config.arm, config.seed)))
    fitted = own.uniform(58, 64)
    grok = GROKS.get(config.optimizer, 1000) * own.uniform(0.9, 1.1) * (config.lr / 0.08) ** 0.2
    lines = []
    for step in range(1, config.steps + 1):
        train = 1 / (1 + math.exp(-(math.log(step / fitted)) * 14 - 5))
        line = {"step": step, "loss": 4.6 * (1 - train) + 0.001, "train_accuracy": min(1.0, train)}
        if step % config.evaluate_every == 0:
            rise = 1 / (1 + math.exp(-(math.log(step / grok)) * 9 - 5))
            dip = 0.02 if step > 1.2 * grok and own.random() < 0.01 else 0.0
            line["test_accuracy"] = max(0.01, min(1.0, rise + own.gauss(0, 0.002)) - dip)
        if config.telemetry:
            line |= counts(config, step)
        lines.append(line)
    return lines
