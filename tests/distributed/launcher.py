"""Runs a function in several processes at once, and looks at how each of them ended."""

import gc
import io
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.versions import HAS_FSDP2_ON_CPU

# A server that has imported what the ranks need forks them: a world starts in a fraction of a
# second instead of one torch import a rank.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "gomuon",
        "gomuon.lab.costs.comparison",
        "tests.distributed.launcher",
        "tests.methods.test_every_method",
    ]
)
PATIENCE = 100  # seconds, for a whole scenario
DEAD = "dead"


@dataclass(frozen=True)
class Place:
    """Where a scenario runs: one rank of a world, and a folder all of them see."""

    rank: int
    size: int
    folder: Path

    def share(self, sizes: tuple[int, ...]) -> slice:
        """This rank's part when so many rows go to each."""
        return slice(sum(sizes[: self.rank]), sum(sizes[: self.rank + 1]))


Scenario = Callable[..., Any]


def _work(
    place: Place,
    end: Connection,
    scenario: Scenario,
    arguments: dict[str, Any],
    time_out: float,
    meet: bool,
) -> None:
    # What C++ says before it aborts goes there too.
    said = os.open(_said(place), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(place.folder / "store"), place.size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=time_out),
    )
    try:
        answer = (True, scenario(place, **arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    file = io.BytesIO()
    torch.save(answer, file)
    end.send_bytes(file.getvalue())
    if answer[0] and meet:
        dist.barrier()  # nobody closes a connection that another still reads from
    # A process that ends with its group open may abort or hang, and so may its group's threads if
    # models that are gone still hold it.
    gc.collect()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    answer: Any  # (True, what was returned), (False, a traceback), DEAD, or None: time was up
    code: int | None  # of its process; None: it had to be killed
    said: str  # to stderr

    @property
    def is_clean(self) -> bool:
        return self.code == 0 or (self.code is not None and is_torchs_abort({self.code}, self.said))


def is_torchs_abort(codes: set[int], said: str) -> bool:
    """Whether processes that had done their work were aborted at exit by torch's own threads.

    With gloo groups some of those now and then are not joined, also with torch's own optimizers.
    """
    return codes == {-signal.SIGABRT} and "terminate called without an active exception" in said


def endings(
    size: int,
    scenario: Scenario,
    folder: Path,
    *,
    time_out: float = PATIENCE,
    meet: bool = True,
    patience: float = PATIENCE,
    hasty: bool = True,
    **arguments: Any,
) -> list[Ending]:
    """How each rank of a new world ended that ran `scenario(place, **arguments)`.

    Args:
        size: ranks.
        scenario: a function of a module.
        folder: for the ranks' own use.
        time_out: of the process group, in seconds.
        meet: let ranks that have answered wait for each other.
        patience: seconds for everything.
        hasty: do not wait for the others once a rank has raised.
        arguments: for the scenario.
    """
    here = folder / f"world{len(list(folder.iterdir()))}"
    here.mkdir()
    places = [Place(rank, size, here) for rank in range(size)]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(
            target=_work,
            args=(place, pipe[1], scenario, arguments, time_out, meet),
            daemon=True,
        )
        for place, pipe in zip(places, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        deadline = time.monotonic() + patience
        answers = _answers([begin for begin, _ in pipes], deadline, hasty)
        for process in processes:
            process.join(20 if meet else 5)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = [_said(place).read_text() if _said(place).exists() else "" for place in places]
    sys.stderr.write("".join(said))
    return [Ending(*ending) for ending in zip(answers, codes, said, strict=True)]


def launch(
    size: int,
    scenario: Scenario,
    folder: Path,
    *,
    time_out: float = PATIENCE,
    dying: tuple[int, ...] = (),
    **arguments: Any,
) -> list[Any]:
    """What `scenario(place, **arguments)` returns on each rank; a rank that raises fails the test.

    Args:
        size: ranks.
        scenario: a function of a module.
        folder: for the ranks' own use.
        time_out: of the process group, in seconds.
        dying: ranks that must end without an answer; theirs is None, and no barrier is met.
        arguments: for the scenario.
    """
    ended = endings(size, scenario, folder, time_out=time_out, meet=not dying, **arguments)
    answers, codes = [end.answer for end in ended], [end.code for end in ended]
    raised = [answer for answer in answers if answer not in (None, DEAD) and not answer[0]]
    if not HAS_FSDP2_ON_CPU and any("no attribute 'record_event'" in text for _, text in raised):
        pytest.skip(f"torch {torch.__version__} has no FSDP2 on the CPU")
    if raised:
        pytest.fail(f"a rank raised:\n{raised[0][1]}", pytrace=False)
    for rank, answer in enumerate(answers):
        assert (answer == DEAD) == (rank in dying), f"rank {rank} answered {answer}: {codes}"
    if not dying:
        assert all(end.is_clean for end in ended), f"exit codes {codes}"
    return [None if answer == DEAD else answer[1] for answer in answers]


def _said(place: Place) -> Path:
    return place.folder / f"stderr{place.rank}"


def _answers(ends: list[Connection], deadline: float, hasty: bool) -> list[Any]:
    """What came from each rank; DEAD where a rank ended first, None where time was up."""
    answers: list[Any] = [None] * len(ends)
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), left):
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                answers[rank] = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
            except EOFError:
                answers[rank] = DEAD
            if hasty and answers[rank] != DEAD and not answers[rank][0]:
                return answers  # the others may wait for this one for long
    return answers
