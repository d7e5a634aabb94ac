"""A script: KeyboardInterrupt at many moments of a process's first step, and what is left of it.

`python -m tests.threads.interruptions timer` lets a signal come after ever longer delays;
`… instructions` raises at each instruction of the step's threading, one after the other, where the
interpreter would look for signals: when a function begins, and after a call or a jump back.
"""

import contextlib
import dis
import functools
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from gomuon import GoMuon
from gomuon.threads import pool, spreading
from tests.models import mlp

OF_THE_USER = 3
STRIDE = 4  # of instructions; there are some 340
# What the threads of a step are started, awaited and counted in.
FILES = ("threads/spreading.py", "threads/pool.py")
CALLED_FROM_THERE = ("/threading.py", "/contextlib.py")


class Subject:
    """An optimizer, and a process that seems to take its first step."""

    def __init__(self) -> None:
        self.model = mlp(72, 72, 96, 72, 72, bias=False)
        self.optimizer = GoMuon(self.model, lr=0.01, refresh_every=1)
        self.x = torch.randn(100, 72, dtype=torch.float64)

    def backward(self) -> None:
        """Gradients, and no thread that would serve a step."""
        torch.set_grad_enabled(True)  # an interrupt in torch's own no_grad may leave it off
        self.optimizer.zero_grad()
        (self.model(self.x) - self.x.roll(1, 0)).square().mean().backward()
        for cached in (spreading._workers, spreading._coordinators, pool._runtime):
            cached.cache_clear()

    def step(self) -> None:
        """Take one."""
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        """A copy of all that threads could still write to."""
        entries: list[torch.Tensor] = [*self.model.parameters()]
        for state in self.optimizer.state.values():
            entries += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [entry.detach().clone() for entry in entries]


def check(subject: Subject, moment: str) -> None:
    """Nothing runs, nothing is lent, the user's number is back, and the next step works."""
    assert torch.get_num_threads() == OF_THE_USER, (moment, torch.get_num_threads())
    assert (spreading._this_thread.cores, spreading._this_thread.calls) == (0, ()), moment
    kept = subject.state()
    time.sleep(0.002)
    assert all(map(torch.equal, kept, subject.state())), moment
    subject.backward()
    subject.step()
    assert all(entry.isfinite().all() for entry in subject.state()), moment
    assert torch.get_num_threads() == OF_THE_USER, moment


def by_timer(subject: Subject) -> int:
    """Delays from nothing to a whole step's time; returns how many hit the step."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    subject.backward()
    begin = time.monotonic()
    subject.step()
    whole, hits, count = time.monotonic() - begin, 0, 60
    for number in range(count):
        subject.backward()
        delay = max(1e-6, whole * number / count)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            subject.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            hits += 1
        check(subject, f"after {delay} s")
    return hits


class Moment:
    """Raises at the nth instruction where the main thread looks for signals while it threads."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Moment | None":
        path = frame.f_code.co_filename
        called = path.endswith(CALLED_FROM_THERE) and _comes_from_ours(frame)
        if self.where or not (path.endswith(FILES) or called):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self._last.get(frame, "").startswith(("CALL", "JUMP_BACKWARD")):
                self._count(frame)
            self._last[frame] = _instructions(frame.f_code)[frame.f_lasti]
        elif event == "call":
            self._count(frame)
        return self

    def _count(self, frame: FrameType) -> None:
        self.left -= 1
        if self.left < 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, at {frame.f_lasti}"
            raise KeyboardInterrupt


@functools.cache
def _instructions(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def _comes_from_ours(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename.endswith(FILES):
            return True
        caller = caller.f_back
    return False


@contextlib.contextmanager
def tracing(moment: Moment) -> Iterator[None]:
    """`moment` as this thread's tracer."""
    sys.settrace(moment)
    try:
        yield
    finally:
        sys.settrace(None)


def by_instructions(subject: Subject) -> int:
    """Every fourth; returns how many there are."""
    for number in itertools.count(0, STRIDE):
        subject.backward()
        moment = Moment(number)
        with contextlib.suppress(KeyboardInterrupt), tracing(moment):
            subject.step()
        check(subject, moment.where)
        if not moment.where:
            return number
    raise AssertionError


def main(how: str) -> None:
    """Print how often the step was interrupted."""
    torch.set_num_threads(OF_THE_USER)
    print({"timer": by_timer, "instructions": by_instructions}[how](Subject()))


if __name__ == "__main__":
    main(sys.argv[1])
