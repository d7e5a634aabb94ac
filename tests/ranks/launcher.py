"""Runs a function in several processes at once, and looks at how each of them ended."""

import io
import multiprocessing as mp
import os
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
        "gomuon.lab.planning.outlook",
        "tests.ranks.launcher",
        "tests.test_every_recipe",
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
    # A process that ends with its group open may abort or hang.
    dist.destroy_process_group()


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
    here = folder / f"world{len(list(folder.iterdir()))}"
    here.mkdir()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(
            target=_work,
            args=(
                Place(rank, size, here),
                pipes[rank][1],
                scenario,
                arguments,
                time_out,
                not dying,
            ),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        answers = _answers([begin for begin, _ in pipes], time.monotonic() + PATIENCE)
        for process in processes:
            process.join(20 if not dying else 5)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    raised = [answer for answer in answers if answer not in (None, DEAD) and not answer[0]]
    if raised:
        pytest.fail(f"a rank raised:\n{raised[0][1]}", pytrace=False)
    for rank, answer in enumerate(answers):
        assert (answer == DEAD) == (rank in dying), f"rank {rank} answered {answer}: {codes}"
    if not dying:
        assert codes == [0] * size, f"exit codes {codes}"
    return [None if answer == DEAD else answer[1] for answer in answers]


def _answers(ends: list[Connection], deadline: float) -> list[Any]:
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
            if answers[rank] != DEAD and not answers[rank][0]:
                return answers  # the others may wait for this one for long
    return answers
