"""One of several ranks is killed, raises or stalls at a random moment; the others must notice."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon import KFAC, SOAP, GoMuon, Muon, Shampoo
from gomuon.errors import RankError
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import DEAD, Ending, Place, endings
from tests.distributed.worlds import wrapped
from tests.models import tokens, transformer
from tests.versions import HAS_FSDP2_ON_CPU

CASES = 30

METHODS: tuple[type[MatrixOptimizer], ...] = (GoMuon, KFAC, Muon, Shampoo, SOAP)
WARM = 3  # iterations
TIME_OUT = 6.0  # seconds, of the process group
GRACE = 10.0  # seconds more in which a rank must have ended, on a machine that others use as well
HANGING = 90.0  # seconds after which a whole case is given up


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and when."""

    size: int
    victim: int
    kind: str
    work: str
    method: int
    what: str  # "kill", "raise" or "stall"
    later: int  # whole iterations after the warm ones
    since: str  # in an iteration from its "forward" pass on, or from its "step" on
    moment: float  # which part of that has gone by then: of its seconds, or of its operations


@dataclass(frozen=True)
class Told:
    """How a rank's training ended."""

    phase: str  # what it was about: "forward", "backward", "step"; "" when it went on
    error: str
    words: str
    when: float


def fault_of(seed: int) -> Fault:
    rng = random.Random(seed)
    size = rng.choice((2, 3))
    sharded = "fsdp" if HAS_FSDP2_ON_CPU else "ddp"
    kind, work = rng.choice((("ddp", "auto"), ("ddp", "replicated"), (sharded, "auto")))
    return Fault(
        size=size,
        victim=rng.randrange(size),
        kind=kind,
        work=work,
        method=rng.randrange(len(METHODS)),
        what=rng.choice(("kill", "raise", "stall")),
        later=rng.randrange(5),
        since=rng.choice(("forward", "step", "step")),
        moment=rng.random(),
    )


class AtOperation(TorchDispatchMode):
    """Counts this thread's operations, and acts at one of them."""

    def __init__(self, number: int | None = None, act: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.count, self.number, self.act = 0, number, act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            self.act()
        return func(*args, **(kwargs or {}))


class Training:
    """One iteration after the other, that knows which phase it is in."""

    def __init__(self, place: Place, fault: Fault) -> None:
        self.place = place
        self.model = wrapped(transformer(layers=1), fault.kind)
        self.optimizer = METHODS[fault.method](self.model, work=fault.work)
        self.phase, self.number = "", 0

    def iterate(self, since: str = "", within: AbstractContextManager[Any] | None = None) -> None:
        """Go through the phases; from one of them on within a context."""
        with ExitStack() as context:
            for phase in ("forward", "backward", "step"):
                self.phase = phase
                if phase == since and within is not None:
                    context.enter_context(within)
                getattr(self, phase)()

    def forward(self) -> None:
        window = tokens(10 * self.number + self.place.rank, 2)
        self.number += 1
        logits = self.model(window[:, :-1])
        self.loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss.backward()

    def step(self) -> None:
        self.optimizer.step()


@contextmanager
def killed_after(seconds: float, die: Callable[[], None]) -> Iterator[None]:
    threading.Timer(seconds, die).start()
    yield


def training(place: Place, fault: Fault) -> Told:
    """Train until something is wrong; long after the fault that is wrong too."""
    train = Training(place, fault)
    for _ in range(WARM):
        train.iterate()
    all_of_them = AtOperation()
    begin = time.monotonic()
    train.iterate(fault.since, all_of_them)
    seconds = time.monotonic() - begin
    dist.barrier()
    for _ in range(fault.later):
        train.iterate()
    happened = place.folder / "happened"

    def die() -> None:
        happened.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def fail() -> None:
        happened.write_text(str(time.time()))
        raise MemoryError("there is none left")

    def stall() -> None:
        happened.write_text(str(time.time()))
        time.sleep(2 * TIME_OUT)

    number = 1 + int(fault.moment * all_of_them.count)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "kill": lambda: killed_after(fault.moment * seconds, die),
        "raise": lambda: AtOperation(number, fail),
        "stall": lambda: AtOperation(number, stall),
    }
    try:
        if place.rank == fault.victim:
            train.iterate(fault.since, ways[fault.what]())
        begin = time.monotonic()
        while time.monotonic() - begin < 2 * TIME_OUT + GRACE:
            train.iterate()
    except Exception as error:
        words = "; ".join([str(error), *getattr(error, "__notes__", ())])
        return Told(train.phase, type(error).__name__, words, time.time())
    return Told("", "", "", time.time())


def outcome(seed: int, folder: Path) -> tuple[Fault, list[Ending], float]:
    """The fault, how every rank ended, and when the fault happened."""
    fault = fault_of(seed)
    ended = endings(
        fault.size, training, folder, time_out=TIME_OUT, meet=False, patience=HANGING, hasty=False,
        fault=fault,
    )  # fmt: skip
    happened = next(folder.glob("world*/happened"), None)
    return fault, ended, 0.0 if happened is None else float(happened.read_text())


def wrong_with(rank: int, end: Ending, happened: float) -> str | None:
    """What is wrong with how a rank ended that was told of a fault in another, or None."""
    if end.answer is None:
        return f"rank {rank} did not end: it hangs"
    if end.answer == DEAD:
        return f"rank {rank} ended with code {end.code} and without an error: {end.said[-300:]}"
    came, told = end.answer
    if not came:
        return f"rank {rank} failed outside of training: {told[-300:]}"
    if not told.phase:
        return f"rank {rank} went on training without noticing"
    if told.phase == "step" and told.error != RankError.__name__:
        return f"rank {rank} raised {told.error} in the step: {told.words[:300]}"
    if told.phase != "step" and told.error not in ("RuntimeError", "DistBackendError"):
        # In forward and backward passes it is torch that talks, and torch that raises.
        return f"rank {rank} raised {told.error} in the {told.phase} pass: {told.words[:300]}"
    if told.when - happened > TIME_OUT + GRACE:
        return f"rank {rank} noticed after {told.when - happened:.0f} s"
    if not end.is_clean:
        return f"rank {rank} raised {told.error} and then ended with code {end.code}"
    return None


def case(seed: int, folder: Path) -> str | None:
    """Lose one rank; see how the others end."""
    fault, ended, happened = outcome(seed, folder)
    if not happened:
        return f"the fault did not happen: {[end.answer for end in ended]}"
    for rank, end in enumerate(ended):
        if rank != fault.victim and (wrong := wrong_with(rank, end, happened)) is not None:
            return f"{wrong} ({fault})"
    return None
