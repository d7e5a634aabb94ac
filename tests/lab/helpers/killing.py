"""Kill a process and its workers at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

LONGEST = 0.25  # seconds until a kill


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


def wait_or_kill(process: Any, random_: random.Random, longest: float = LONGEST) -> bool:
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
    process.join(random_.uniform(0, longest))
    if not process.is_alive():
        assert process.exitcode == 0
        return False
    try:
        kill(process, random_)
    except ProcessLookupError:
        return False  # it was quicker
    return True
