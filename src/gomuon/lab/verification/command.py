"""The command `gomuon verify`."""

from __future__ import annotations

import json as jsons
import sys
from dataclasses import replace

import torch

from gomuon.lab.errors import LabError
from gomuon.lab.flags import Flag, OptionalText
from gomuon.lab.input_checks import require_whole
from gomuon.lab.machine import on_threads
from gomuon.lab.terminal import SafeConsole
from gomuon.lab.verification.adversary import Effort
from gomuon.lab.verification.every_statement import STATEMENTS
from gomuon.lab.verification.live_checks import watch
from gomuon.lab.verification.verdict import as_dict, failure, judge, print_verdicts

MOST_SEEDS = 1_000  # takes about two hours
LIVE_RUNS = 4  # at most
QUICK_ROUNDS = 15  # instead of 100


def verify(
    device: OptionalText = "cpu", seeds: int = 5, quick: Flag = False, json: Flag = False
) -> None:
    """Try to break every statement of the paper, and what this package promises, on this machine.

    A search looks for the worst case of each, from random starts and by many small changes, also
    among ill-conditioned and rank-deficient matrices. Many statements are checked at each step of
    short training runs as well. All in float64 unless it says otherwise. Takes under a minute.

    Args:
        device: Such as cpu or cuda; it must support float64.
        seeds: How hard to search: pairs of starts for each form of instance. Up to 4 live runs.
        quick: A small part of the search, and one live run.
        json: Print everything as JSON.
    """
    require_whole("--seeds", seeds, most=MOST_SEEDS)
    effort = Effort(_device(device), seeds)
    if quick:
        effort = replace(effort, rounds=QUICK_ROUNDS)
    with on_threads(1):  # the matrices are tiny: threads would wait for each other
        watched = watch(effort.device, 1 if quick else min(seeds, LIVE_RUNS))
        verdicts = judge(STATEMENTS, watched, effort)
    if json:
        sys.stdout.write(jsons.dumps(as_dict(verdicts, effort), indent=2) + "\n")
    else:
        print_verdicts(verdicts, effort, SafeConsole())
    failed = [failure(verdict) for verdict in verdicts if not verdict.holds]
    if failed:
        raise LabError(
            f"{len(failed)} of {len(verdicts)} statements fail here: {'; '.join(failed)}. Please "
            "report this with your versions of torch, driver and BLAS"
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).sum().item()
    except Exception as error:  # a backend may raise anything
        reason = " ".join(str(error).split())[:120]
        raise LabError(f"--device {name!r} cannot be used in float64: {reason}") from None
    return device
