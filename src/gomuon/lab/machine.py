"""Where and with what a run was made, for its manifest."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy
import torch

import gomuon


def versions() -> dict[str, str]:
    return {
        "gomuon": gomuon.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def facts() -> dict[str, str | int]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": cores(),
    }


def processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """The cores this process may use, which inside a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def source_commit() -> str | None:
    """The commit gomuon runs from, when it runs from its own checkout."""
    package = Path(gomuon.__file__).resolve().parent
    if not (package.parent.parent / ".git").exists():
        return None
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
