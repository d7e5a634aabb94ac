"""Run the cases of a campaign in processes of their own, and count what failed."""

import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

Case = Callable[[int, Path], str | None]

# Name of the module -> what one case is, for the page.
CAMPAIGNS: dict[str, str] = {
    "steps": "a fault in activations, gradients or one layer; then five clean steps must train",
    "interrupts": "an exception at one operation of a step; the next step must be correct",
    "calls": "a call of a public function with arguments at random",
    "checkpoints": "a checkpoint damaged or forged, then loaded",
    "commands": "a command line with values at random",
    "kills": "a campaign of runs killed at a random moment, then continued",
    "ranks": "one of several ranks killed at a random moment",
}


@dataclass(frozen=True)
class Failure:
    """A case that went wrong, and how to repeat it."""

    seed: int
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What a campaign came to."""

    name: str
    cases: int
    seconds: float
    failures: tuple[Failure, ...]


def module_of(name: str) -> tuple[Case, int]:
    """A campaign's case and the number of its full run."""
    module = importlib.import_module(f"tests.faults.{name}")
    return module.case, module.CASES


def methods_of(name: str) -> list[str]:
    """The methods that a campaign goes through; none if it is not about methods."""
    return list(getattr(importlib.import_module(f"tests.faults.{name}"), "METHOD_NAMES", []))


def run(name: str, seeds: Iterable[int], processes: int = 2) -> Outcome:
    """Every seed's case, in order within each process."""
    begin = time.monotonic()
    jobs = [(name, seed) for seed in seeds]
    if processes == 1:
        reasons = [reason_of(job) for job in jobs]
    else:
        # Not forked: torch's threads do not survive that.
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_alone) as pool:
            reasons = list(pool.map(reason_of, jobs, chunksize=max(1, min(50, len(jobs) // 8))))
    failures = tuple(
        Failure(seed, reason)
        for (_, seed), reason in zip(jobs, reasons, strict=True)
        if reason is not None
    )
    return Outcome(name, len(jobs), time.monotonic() - begin, failures)


def reason_of(job: tuple[str, int]) -> str | None:
    """Why a case failed; None when it held."""
    name, seed = job
    case, _ = module_of(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case(seed, Path(folder))
        except Exception:
            return traceback.format_exc(limit=-3)


def _alone() -> None:
    """Processes side by side compute on a core each."""
    torch.set_num_threads(1)
