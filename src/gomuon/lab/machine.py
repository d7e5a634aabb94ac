"""The machine and the versions a run was made with, and torch's threads."""

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
EDITED = "-edited"  # appended to a commit if files were changed and not committed


def versions() -> dict[str, str]:
    return {
        "gomuon": gomuon.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def facts() -> dict[str, str | int]:
    return {
        "system": platform.system(),  # no release: a kernel's name may identify a single host
        "processor": processor(),
        "cores": cores(),
    }


def comparable(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded facts in the form of `facts`; older files also have the system's release."""
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
    """Memory of this machine in bytes; a terabyte if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 10**12


def cores() -> int:
    """Cores that this process may use; in a container these can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def source_commit() -> str | None:
    """The commit of gomuon's own checkout, None if it is installed; see `commit_of`."""
    return commit_of(Path(gomuon.__file__).resolve().parent)


def commit_of(package: Path) -> str | None:
    """The commit of the checkout with ``src/package``, with EDITED if the package was changed."""
    if not (package.parent.parent / ".git").exists():
        return None
    try:
        commit = _git(package, "rev-parse", "HEAD")
        return commit + EDITED if _git(package, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def short_commit(commit: str) -> str:
    """The first characters of a commit, with EDITED if it ends with that."""
    return commit[:SHORT] + (EDITED if commit.endswith(EDITED) else "")


def _git(folder: Path, *words: str) -> str:
    # Without optional locks: a killed `git status` would leave an index.lock that blocks commits.
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
