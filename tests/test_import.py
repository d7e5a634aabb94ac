"""`import gomuon` is light: what takes long to load waits until it is needed."""

import subprocess
import sys

HEAVY = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "numpy.testing")


def loaded_by(code: str) -> set[str]:
    """Which of the heavy modules a new process has loaded after these lines, beyond torch's own."""
    script = (
        f"import sys, torch\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return {name for name in run.stdout.split() if name in HEAVY}


def test_importing_loads_neither_the_compiler_nor_sharded_tensors() -> None:
    assert loaded_by("import gomuon, gomuon.functional") == set()


def test_the_check_can_fail() -> None:
    assert loaded_by("import torch._dynamo") >= {"torch._dynamo"}
