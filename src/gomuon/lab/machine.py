"""Where and with what a run was made, for its manifest."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

import gomuon

SHORT = 12
EDITED = "-edited"  # behind a commit whose files were changed and not committed


def versions() -> dict[str, str]:
    return {
        "gomuon": gomuon.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def facts() -> dict[str, str | int]:
    return {
        "system": platform.system(),  # no release: a kernel's name may be one host's alone
        "processor": processor(),
        "cores": cores(),
    }


def comparable(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded facts as `facts` gives them; older files have a release behind the system."""
    found = dict(recorded)
    if isinstance(found.get("system"), str):
        found["system"] = found["system"].partition(" ")[0]
    return found


def processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory() -> int:
    """Bytes of memory this machine has; a terabyte where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 10**12


def cores() -> int:
    """The cores this process may use, which inside a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def source_commit() -> str | None:
    """The commit gomuon runs from, when it runs from its own checkout; see `commit_of`."""
    return commit_of(Path(gomuon.__file__).resolve().parent)


def commit_of(package: Path) -> str | None:
    """The commit that ``src/package`` of a checkout is at, with EDITED behind it if it is not."""
    if not (package.parent.parent / ".git").exists():
        return None
    try:
        commit = _git(package, "rev-parse", "HEAD")
        return commit + EDITED if _git(package, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def short_commit(commit: str) -> str:
    """Enough of a commit to find it, and whether it is all that ran."""
    return commit[:SHORT] + (EDITED if commit.endswith(EDITED) else "")


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute on `count` threads, then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
