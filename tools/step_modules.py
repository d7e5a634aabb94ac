"""Count the modules of gomuon that one refresh step passes through, and the calls between them.

    python -m tools.step_modules

The step is Go-MUON's on one rank: forward pass, backward pass and `step()`. It is counted twice,
on one thread and on two. On one thread all calls are seen; on two, the threads' own modules are
passed as well. Prints one line per module: how many calls of its functions came from another one.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gomuon

ROOT = Path(gomuon.__file__).parent
LATE = 12  # a refresh step


class Walk:
    """A profiler that notes which module of gomuon is entered from which other one."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        module = _module(frame)
        if module is None:
            return
        caller = frame.f_back
        while caller is not None and _module(caller) is None:
            caller = caller.f_back  # torch and the standard library in between
        if caller is None or _module(caller) != module:
            self.entered[module] += 1


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def refresh_step(threads: int) -> Walk:
    """A refresh of Go-MUON on a small model, after the first ten steps, which compare rates too."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)
    )
    optimizer = gomuon.GoMuon(model, refresh_every=2)
    x = torch.randn(64, 96)
    walk = Walk()
    for step in range(LATE + 1):
        if step == LATE:
            sys.setprofile(walk)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    sys.setprofile(None)
    torch.set_num_threads(before)
    return walk


def count() -> Counter[str]:
    """Calls from other modules, by module: the larger count of one thread and of two."""
    return refresh_step(1).entered | refresh_step(2).entered


def main() -> None:
    """Print the table."""
    entered = count()
    for module, calls in sorted(entered.items()):
        print(f"{calls:5}  {module}")
    print(f"{sum(entered.values()):5}  calls between {len(entered)} modules")


if __name__ == "__main__":
    main()
