"""Scripts in an interpreter of their own: what concerns a process's first step, or its end."""

import os
import subprocess
import sys


def run_script(module: str, *arguments: str, seconds: float = 120) -> str:
    """What `python -m module` prints; it must end by itself, in time and without an error."""
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
