"""Model, optimizer and task of one run in memory."""

from __future__ import annotations

import contextlib
import math
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import gomuon
from gomuon.lab.experiments import optimizers, own_code, tasks
from gomuon.lab.experiments.randomness import seed_all
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results import pairing
from gomuon.lab.results.runs import METRICS, TIMING
from gomuon.lab.running import checkpoint


class Diverged(Exception):
    """The loss, a gradient or an evaluation is not finite."""


class Session:
    """Model, optimizer and task of one run in memory; makes its updates."""

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        # The result depends on the number of threads, so it is part of the configuration.
        torch.set_num_threads(config.threads)
        self.config = config
        self.task = tasks.build(config, data_dir)
        self.model = tasks.build_model(self.task)
        self.hashes = pairing.hashes(self.task, self.model)
        self.own = own_code.is_own(config.task) or own_code.is_own(config.optimizer)
        self.foreign = optimizers.foreign(config.optimizer) is not None
        if self.own:
            seed_all(config.seed, "optimizer")
        self.optimizer = optimizers.build(
            config.optimizer, self.model, config.lr, config.adamw_lr, config.options
        )
        self.multipliers = self.task.multipliers()
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.counter = optimizers.watched(self.optimizer) if config.telemetry else None
        counted = () if self.counter is None else optimizers.COUNTED
        self.before = dict.fromkeys(counted, 0)  # before this process
        self.restored: Path | None = None  # the checkpoint, until the first update after it

    @property
    def note(self) -> str:
        """What a reader should know of the optimizer; "" if nothing."""
        note = getattr(self.optimizer, "note", "")
        return f"{self.config.optimizer} {note}" if note and self.foreign else ""

    def update(self, step: int) -> tuple[dict[str, Any], float]:
        """Make update ``step`` (from 1); return its metrics line and its seconds.

        Raises:
            Diverged: the loss or a gradient is not finite.
        """
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.multipliers[step - 1]
        if self.own:
            seed_all(self.config.seed, "update", step)
        begun = time.perf_counter()
        loss, extra = self.task.loss(self.model, step)
        self.optimizer.zero_grad(set_to_none=True)
        with self._blaming_task("backward()"):
            loss.backward()
        if self.task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged
        try:
            with self._blaming_optimizer("step()"):
                self.optimizer.step()
        except gomuon.NonFiniteGradientError as error:
            raise Diverged from error
        seconds = time.perf_counter() - begun
        evaluated = self.task.evaluate(self.model, step)
        if not all(map(math.isfinite, evaluated.values())):
            raise Diverged
        line = {"step": step, "loss": value, **extra, **evaluated}
        if self.counter is not None:
            line.update(self.counts())
        return line, seconds

    def _blaming_task(self, action: str) -> AbstractContextManager[None]:
        """Code from outside is named in its errors; ours raises as it does."""
        own, name = own_code.is_own(self.config.task), f"task {self.config.task}"
        return own_code.blaming(name, action) if own else contextlib.nullcontext()

    def _blaming_optimizer(self, action: str) -> AbstractContextManager[None]:
        name = f"optimizer {self.config.optimizer}"
        return own_code.blaming(name, action) if self.foreign else contextlib.nullcontext()

    def counts(self) -> dict[str, int]:
        """Counts over all updates, including those before the run was continued."""
        if self.counter is None:
            return dict(self.before)
        now = self.counter.now()
        return {name: seen + now[name] for name, seen in self.before.items()}

    def save(self, path: Path, step: int, lengths: dict[str, int]) -> None:
        position = checkpoint.Position(step, lengths, self.counts())
        checkpoint.save(path, self.model, self.optimizer, position)

    def load(self, path: Path) -> None:
        """Load model and optimizer of a checkpoint that belongs to no files."""
        checkpoint.restore(
            path, self.model, self.optimizer, steps=self.config.steps, files=(), counts=()
        )

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
