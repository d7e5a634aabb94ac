"""The examples run as their first lines say, and one goes on from the other's checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(name: str, *arguments: str) -> tuple[list[int], list[float]]:
    """Steps and losses an example printed on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"^step +(\d+)  loss ([\d.]+)$", run.stdout, re.MULTILINE)
    return [int(step) for step, _ in lines], [float(loss) for _, loss in lines]


def test_ddp_learns_and_fsdp2_goes_on(tmp_path: Path) -> None:
    saved = str(tmp_path / "ddp")
    steps, losses = torchrun("ddp.py", "--steps", "21", "--out", saved)
    assert steps == [0, 10, 20]
    assert losses[0] > losses[1] > losses[2]
    more = ("--steps", "10", "--resume", saved, "--out", str(tmp_path / "fsdp2"))
    later, further = torchrun("fsdp2.py", *more)
    assert later == [30]
    assert further[0] < losses[2]
    assert (tmp_path / "fsdp2" / ".metadata").exists()
