"""Threads that answer calls, and never go on after whoever asked has left.

Ctrl-C raises KeyboardInterrupt in the main thread, between any two of its instructions. Python's
own threads, futures and pools do not bear that: a lock may stay taken, or a thread that nobody
knows of waits for ever and keeps the process from ending. So here the asking side does only what
can be done again after an interrupt (set a flag, pass a lock, put into a queue), and threads are
those of `_thread`, which start in one instruction and end with the process.
"""

import _thread
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from gomuon.functional.own_threads import OwnThreads

Result = TypeVar("Result")


class Crew:
    """Threads that wait for calls; torch's operations use `threads_each` in each of them."""

    def __init__(self, threads_each: int) -> None:
        self._threads_each = threads_each
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._hired = 0
        self._hiring = threading.Lock()

    def hire(self, size: int) -> None:
        """Have at least so many threads."""
        if self._hired >= size:
            return
        with self._hiring:
            while self._hired < size:
                _thread.start_new_thread(_serve, (self._calls, self._threads_each))
                # Counted afterwards: after an interrupt there may be one more than is known, which
                # does no harm, but never one less, which calls would wait for.
                self._hired += 1

    def give(self, call: "_Call[Any]") -> None:
        """Have it answered, by whoever is free first."""
        self._calls.put(call)


def _serve(calls: "SimpleQueue[_Call[Any]]", threads_each: int) -> None:
    OwnThreads().set(threads_each)
    while True:
        call = calls.get()
        call.answer()
        del call  # it holds tensors


class Work(Generic[Result]):
    """Calls that a crew answers side by side."""

    def __init__(self, calls: Sequence[Callable[[], Result]]) -> None:
        self._end = _End()
        self._calls = [_Call(call, self._end) for call in calls]

    def results(self, crew: Crew, size: int) -> Iterator[Result]:
        """Each call's result in turn, by `size` threads; none runs any more when this has ended."""
        try:
            crew.hire(size)
            for call in self._calls:
                crew.give(call)
            for call in self._calls:
                yield call.result()
        finally:
            try:
                self.end()
            finally:
                self.end()  # again, for an interrupt may have cut the first time short

    def end(self) -> None:
        """Begin no more calls and wait for those that run, whatever interrupts the waiting."""
        self._end.reached = True
        interrupt: BaseException | None = None
        while True:
            try:
                for call in self._calls:
                    if call.begun:
                        call.wait()
                break
            except BaseException as exception:
                interrupt = exception
        if interrupt is not None:
            raise interrupt


class _End:
    """Whether some work has ended; not a part of it, so that nothing refers to itself."""

    reached = False


class _Call(Generic[Result]):
    """One call of some work, and what came of it."""

    def __init__(self, call: Callable[[], Result], end: _End) -> None:
        self.begun = False
        self._call: Callable[[], Result] | None = call
        self._end = end
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def answer(self) -> None:
        """Make the call, unless its work has ended; in a crew's thread."""
        # First say so, then look: either the work sees that this has begun, or this sees its end.
        self.begun = True
        call, self._call = self._call, None  # it holds tensors
        try:
            if call is None or self._end.reached:
                raise RuntimeError("a result was asked for after its work had ended")
            self._result.append(call())
        except BaseException as exception:
            self._error = exception
        finally:
            del call
            self._running.release()

    def wait(self) -> None:
        """Until it has been answered; any number of times."""
        with self._running:
            pass

    def result(self) -> Result:
        """What the call returned, once, or raise what it raised."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._result.pop()
