"""Train one run in one folder; it can be killed at any time and continued.

The metrics file grows line by line, and a checkpoint records its length. A continued run cuts the
file to that length and repeats the later updates, which give the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gomuon
from gomuon.lab import formatting, machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, tasks
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import (
    Journal,
    locked,
    make_folder,
    read_json_lines,
    refuse_links,
    remove_leftovers,
    write_json,
)
from gomuon.lab.input_checks import BAD_VALUE_ERRORS
from gomuon.lab.results import pairing
from gomuon.lab.results.runs import (
    CHECKPOINT,
    FORMAT,
    MANIFEST,
    METRICS,
    RESULT,
    RESUMED,
    TIMING,
    Resumption,
    file_sha256,
    is_finished,
    read_manifest,
    resumptions,
)
from gomuon.lab.results.statistics import run_result
from gomuon.lab.running import checkpoint


@dataclass(frozen=True)
class UpdateReport:
    """The progress of a run after an update."""

    step: int
    seconds: float
    metrics: dict[str, Any]


class Diverged(Exception):
    """The loss or a gradient is not finite."""


class Session:
    """Model, optimizer and task of one run in memory; makes its updates."""

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        # The result depends on the number of threads, so it is part of the configuration.
        torch.set_num_threads(config.threads)
        self.config = config
        self.task = tasks.build(config, data_dir)
        self.model = tasks.build_model(self.task)
        self.hashes = pairing.hashes(self.task, self.model)
        self.optimizer = optimizers.build(
            config.optimizer, self.model, config.lr, config.adamw_lr, config.options
        )
        self.multipliers = self.task.multipliers()
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.counter = optimizers.watched(self.optimizer) if config.telemetry else None
        counted = () if self.counter is None else optimizers.COUNTED
        self.before = dict.fromkeys(counted, 0)  # before this process
        self.restored: Path | None = None  # the checkpoint, until the first update after it

    def update(self, step: int) -> tuple[dict[str, Any], float]:
        """Make update ``step`` (from 1); return its metrics line and its seconds.

        Raises:
            Diverged: the loss or a gradient is not finite.
        """
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.multipliers[step - 1]
        begun = time.perf_counter()
        loss, extra = self.task.loss(self.model, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged
        try:
            self.optimizer.step()
        except gomuon.NonFiniteGradientError as error:
            raise Diverged from error
        seconds = time.perf_counter() - begun
        line = {"step": step, "loss": value, **extra, **self.task.evaluate(self.model, step)}
        if self.counter is not None:
            line.update(self.counts())
        return line, seconds

    def counts(self) -> dict[str, int]:
        """Counts over all updates, including those before the run was continued."""
        if self.counter is None:
            return dict(self.before)
        now = self.counter.now()
        return {name: seen + now[name] for name, seen in self.before.items()}

    def save(self, path: Path, step: int, lengths: dict[str, int]) -> None:
        position = checkpoint.Position(step, lengths, self.counts())
        checkpoint.save(path, self.model, self.optimizer, position)

    def restore(self, path: Path) -> tuple[int, dict[str, int]]:
        """Load a checkpoint; return its last update and the lengths of the files at that time."""
        found = checkpoint.restore(
            path,
            self.model,
            self.optimizer,
            steps=self.config.steps,
            files=(METRICS, TIMING),
            counts=tuple(self.before),
        )
        self.before, self.restored = found.counts, path
        return found.step, found.lengths


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    report: Callable[[UpdateReport], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Train a run to its end, from where it was stopped; a finished run is not repeated.

    Args:
        config: what to run; a folder with another configuration is refused.
        folder: the run folder.
        data_dir: where the corpora are.
        report: called after every update.
        stop: called before every update; True saves a checkpoint and ends.
        say: called with a message if a run is continued by other code or on another machine.

    Returns:
        Whether the run is finished.
    """
    folder = Path(folder)
    make_folder(folder)
    with locked(folder):
        remove_leftovers(folder)
        if is_finished(folder):
            _same_config(config, folder)
            return True
        refuse_links(*(folder / name for name in (MANIFEST, METRICS, TIMING, CHECKPOINT, RESULT)))
        session = Session(config, data_dir)
        _open_manifest(session, folder)
        step, lengths = 0, {METRICS: 0, TIMING: 0}
        if (folder / CHECKPOINT).exists():
            step, lengths = session.restore(folder / CHECKPOINT)
        metrics = Journal(folder / METRICS, lengths[METRICS])
        timing = Journal(folder / TIMING, lengths[TIMING])
        try:
            _record_changes(config, folder, step, say)
            return _continue(session, folder, step, metrics, timing, report, stop)
        finally:
            metrics.close()
            timing.close()


def _continue(
    session: Session,
    folder: Path,
    step: int,
    metrics: Journal,
    timing: Journal,
    report: Callable[[UpdateReport], None],
    stop: Callable[[], bool],
) -> bool:
    def save() -> None:
        for journal in (metrics, timing):
            journal.sync()
        lengths = {METRICS: metrics.length, TIMING: timing.length}
        session.save(folder / CHECKPOINT, step, lengths)

    config, diverged = session.config, None
    while step < config.steps:
        if stop():
            save()
            return False
        try:
            line, seconds = session.update(step + 1)
        except Diverged:
            # A normal outcome: the race goes on, and the report says so.
            diverged = step + 1
            break
        except Exception as error:
            if session.restored is None:
                raise
            raise checkpoint.unusable(session.restored, error) from error
        session.restored = None
        step += 1
        metrics.append(line)
        timing.append({"step": step, "seconds": round(seconds, 6)})
        if step % config.checkpoint_every == 0 or step == config.steps:
            save()
        report(UpdateReport(step, seconds, line))
    lines = read_json_lines(folder / METRICS, whole=True)
    try:
        result = {"steps": step, **run_result(config.task, config.steps, lines)}
    except BAD_VALUE_ERRORS as error:
        raise LabError(
            f"{folder / METRICS}: a line lacks values ({type(error).__name__}: {error}); "
            "delete this run's folder and run the command again to repeat it"
        ) from error
    if diverged is not None:
        result["diverged_at"] = diverged
    if session.counter is not None:
        result.update(session.counts())
    result["metrics_sha256"] = file_sha256(folder / METRICS)
    write_json(folder / RESULT, result)
    return True


def _open_manifest(session: Session, folder: Path) -> None:
    """Write the manifest of a new run; check that of a continued one."""
    path = folder / MANIFEST
    if path.exists():
        manifest = _same_config(session.config, folder)
        differing = pairing.differing_fields(manifest["hashes"], session.hashes)
        if differing:
            raise LabError(f"{folder} cannot be continued: its {differing[0]} hash has changed")
        return
    write_json(
        path,
        {
            "format": FORMAT,
            "config": session.config.as_dict(),
            "hashes": session.hashes,
            **_provenance(session.config),
        },
    )


def _provenance(config: RunConfig) -> dict[str, Any]:
    """Code, versions and machine of a run; they may change when it is continued."""
    return {
        "commit": machine.source_commit(),
        "versions": machine.versions(),
        "machine": {**machine.facts(), "threads": config.threads},
    }


def _record_changes(config: RunConfig, folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Add changes of code, versions or machine to the manifest."""
    manifest, now = read_manifest(folder), _provenance(config)
    earlier = resumptions(manifest, folder)
    known = earlier[-1].as_dict() if earlier else manifest
    changed = [name for name in now if _comparable(known.get(name)) != _comparable(now[name])]
    if not changed:
        return
    entry = Resumption(step=step, **now).as_dict()
    write_json(folder / MANIFEST, {**manifest, RESUMED: [*(e.as_dict() for e in earlier), entry]})
    say(
        f"{folder.name}: {formatting.listing(changed)} changed after update {step}; "
        f"{MANIFEST} has the old and the new values"
    )


def _comparable(value: Any) -> Any:
    return machine.comparable(value) if isinstance(value, dict) else value


def _same_config(config: RunConfig, folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    recorded, wanted = manifest["config"], config.as_dict()
    for name in wanted:
        # A missing field counts as different, not as its default.
        if recorded.get(name) != _plain(wanted[name]):
            raise LabError(
                f"{folder} was started with {name}={recorded.get(name)!r}, not {wanted[name]!r}; "
                "choose another folder with --out"
            )
    return manifest


def _plain(value: Any) -> Any:
    """A value as JSON returns it."""
    return list(value) if isinstance(value, tuple) else value
