"""The examples run as their first lines say, and one goes on from the other's checkpoint."""

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gomuon import GoMuon
from tests.distributed.launcher import is_torchs_abort
from tests.test_examples import TINY_GPT, example, logged, train_gpt
from tests.versions import HAS_FSDP2_ON_CPU

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2


def torchrun(script: Path, *arguments: str) -> str:
    """What a script printed on two processes, each of which must have come to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*command, f"--nproc-per-node={RANKS}", str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    for rank in range(RANKS):
        assert f"rank {rank} is done" in run.stdout, run.stdout + run.stderr
    if run.returncode:
        codes = {int(code) for code in re.findall(r"exitcode  : (-?\d+)", run.stderr)}
        ended = -signal.SIGTERM  # by torchrun, when another was aborted
        assert is_torchs_abort(codes - {ended}, run.stderr), run.stderr
    return run.stdout


def losses_of(printed: str) -> tuple[list[int], list[float]]:
    """Steps and losses an example printed."""
    lines = re.findall(r"^step +(\d+)  loss ([\d.]+)$", printed, re.MULTILINE)
    return [int(step) for step, _ in lines], [float(loss) for _, loss in lines]


def test_ddp_learns_and_fsdp2_goes_on(tmp_path: Path) -> None:
    saved = str(tmp_path / "ddp")
    printed = torchrun(EXAMPLES / "ddp.py", "--steps", "21", "--out", saved)
    steps, losses = losses_of(printed)
    assert steps == [0, 10, 20]
    assert losses[0] > losses[1] > losses[2]
    if not HAS_FSDP2_ON_CPU:
        return
    more = ("--steps", "10", "--resume", saved, "--out", str(tmp_path / "fsdp2"))
    later, further = losses_of(torchrun(EXAMPLES / "fsdp2.py", *more))
    assert later == [30]
    assert further[0] < losses[2]
    assert (tmp_path / "fsdp2" / ".metadata").exists()


def test_two_processes_of_train_gpt_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with micro-batches; and one process goes on from the checkpoint of both."""
    one, two = tmp_path / "one", tmp_path / "two"
    torchrun(
        EXAMPLES / "train_gpt.py", *TINY_GPT, "--steps=8", "--accumulate=2", f"--out={two}"
    )  # fmt: skip
    module = example("train_gpt")  # layers take turns, as they do on several ranks
    monkeypatch.setattr(module, "GoMuon", functools.partial(GoMuon, stagger=True))
    losses, validation = train_gpt(one, "--steps=8", module=module)
    found, also = logged(two)
    assert len(found) == 8
    assert found == pytest.approx(losses, rel=1e-4)
    assert also == pytest.approx(validation, rel=1e-4)
    states = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (one, two)]
    entries = [
        {number: state.keys() for number, state in saved["optimizer"]["state"].items()}
        for saved in states
    ]
    assert entries[0] == entries[1]
    on_one = [train_gpt(out, "--steps=10", "--resume", module=module)[0] for out in (one, two)]
    assert on_one[0][8:] == pytest.approx(on_one[1][8:], rel=1e-4)
    assert len(on_one[0]) == 10


# What a process does at its end, of which torchrun tells.
ENDINGS = """
import os, sys, time
rank = int(os.environ["RANK"])
before, words, after = sys.argv[1:]
if before == "abort" and rank == 0:
    os.abort()
print(f"rank {rank} is done", flush=True)
if rank == 0:
    time.sleep(1)
    print(words, file=sys.stderr, flush=True)
    {"abort": os.abort, "exit": lambda: sys.exit(3)}[after]()
"""


@pytest.mark.parametrize(
    ("before", "words", "after", "accepted"),
    [
        ("", "terminate called without an active exception", "abort", True),
        ("", "terminate called after throwing an instance of 'gloo::Error'", "abort", False),
        ("", "terminate called without an active exception", "exit", False),
        ("abort", "", "abort", False),
    ],
    ids=["torch's abort", "another abort", "another end", "before the results"],
)
def test_only_an_abort_after_the_results_is_torchs(
    before: str, words: str, after: str, accepted: bool, tmp_path: Path
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDINGS)
    if accepted:
        assert "rank 1 is done" in torchrun(script, before, words, after)
    else:
        with pytest.raises(AssertionError):
            torchrun(script, before, words, after)
