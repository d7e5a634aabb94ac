"""Worker threads that stop when their caller stops, and torch's thread count for one thread only.

Ctrl-C raises KeyboardInterrupt in the main thread, between any two of its instructions. Python's
own threads, futures and pools are not safe then: a lock may stay locked, or a thread may wait
forever, so that the process cannot end. So the caller does only things that can be repeated after
an interrupt (set a flag, take a lock, put into a queue). The threads are made by `_thread`: they
start in one instruction and end with the process.
"""

import _thread
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Pool:
    """Threads that wait for calls. In each, torch computes on one core."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._started = 0
        self._starting = threading.Lock()

    def grow(self, size: int) -> None:
        """Start threads until there are at least `size`."""
        if self._started >= size:
            return
        with self._starting:
            while self._started < size:
                _thread.start_new_thread(_serve, (self._calls,))
                # Counted after the start: an interrupt in between leaves one thread too many, which
                # is harmless. With one thread too few, calls could wait forever.
                self._started += 1

    def submit(self, call: "_Call[Any]") -> None:
        """Queue a call for the first free thread."""
        self._calls.put(call)


def _serve(calls: "SimpleQueue[_Call[Any]]") -> None:
    ThreadCount().set(1)
    while True:
        call = calls.get()
        call.run()
        del call  # it holds tensors


class Calls(Generic[Result]):
    """Calls that a pool runs in parallel."""

    def __init__(self, calls: Sequence[Callable[[], Result]]) -> None:
        self._end = _End()
        self._calls = [_Call(call, self._end) for call in calls]

    def results(self, pool: Pool, size: int) -> Iterator[Result]:
        """The results in order, from `size` threads. No call runs after the iterator ends."""
        try:
            pool.grow(size)
            for call in self._calls:
                pool.submit(call)
            for call in self._calls:
                yield call.result()
        finally:
            try:
                self.end()
            finally:
                self.end()  # again, because an interrupt may have cut the first one short

    def end(self) -> None:
        """Start no more calls and wait for the running ones, also if interrupted meanwhile."""
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
    """Whether `Calls.end` was called. A separate object, to avoid a reference cycle."""

    reached = False


class _Call(Generic[Result]):
    """One call and its result."""

    def __init__(self, call: Callable[[], Result], end: _End) -> None:
        self.begun = False
        self._call: Callable[[], Result] | None = call
        self._end = end
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Run the call, unless the calls have ended. Called in a thread of the pool."""
        # Set `begun` before reading `reached`: then either `Calls.end` sees `begun`, or this call
        # sees `reached`. In the other order both could be missed.
        self.begun = True
        call, self._call = self._call, None  # it holds tensors
        try:
            if call is None or self._end.reached:
                raise RuntimeError("a result was asked for after its calls had ended")
            self._result.append(call())
        except BaseException as exception:
            self._error = exception
        finally:
            del call
            self._running.release()

    def wait(self) -> None:
        """Wait until the call has run. May be called again."""
        with self._running:
            pass

    def result(self) -> Result:
        """Return the call's result or raise its error. Call it only once."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._result.pop()


# ---- torch's thread count, for the calling thread only -------------------------------------------
#
# `torch.set_num_threads` also sets the initial count of threads that start later: a data loader's
# thread that starts meanwhile would keep it forever. OpenMP and MKL have a count per thread. Only
# these are set here.


@dataclass(frozen=True)
class _Runtime:
    set_openmp: Callable[[int], object]
    set_mkl: Callable[[int], int]  # returns the previous count; 0 means that MKL chooses
    get_mkl: Callable[[], int]

    def set(self, threads: int) -> int:
        self.set_openmp(threads)
        return self.set_mkl(threads)


def can_set_threads() -> bool:
    """Whether one thread's count can be set without changing that of other threads."""
    return _runtime() is not None


class ThreadCount:
    """Sets and restores the calling thread's count. Needs `can_set_threads()`."""

    def __init__(self) -> None:
        runtime = _runtime()
        assert runtime is not None
        self._runtime = runtime
        # The first read in a thread sets its count to the default: read it before setting it.
        self._openmp = torch.get_num_threads()
        self._mkl = runtime.get_mkl()

    def set(self, threads: int) -> None:
        """Compute on `threads` threads. Call it once: `put_back` undoes only the last call."""
        self._mkl = self._runtime.set(threads)

    def put_back(self) -> None:
        """Restore the count. May be called again."""
        self._runtime.set_openmp(self._openmp)
        self._runtime.set_mkl(self._mkl)


@functools.cache
def _runtime() -> _Runtime | None:
    """The functions that torch itself calls; None if they are not found or have no effect."""
    try:
        runtime = _Runtime(
            _symbol("omp_set_num_threads"),
            _symbol("MKL_Set_Num_Threads_Local") if torch.backends.mkl.is_available() else _ignore,
            _symbol("MKL_Get_Max_Threads") if torch.backends.mkl.is_available() else _nothing,
        )
    except AttributeError:
        return None
    return runtime if _acts_on_torch(runtime) else None


def _symbol(name: str) -> Callable[..., int]:
    """The C function that torch calls by this name. Preloaded libraries come first, as in linking.

    Raises:
        AttributeError: there is none.
    """
    for path in (None, torch._C.__file__):
        try:
            # Not CDLL, which releases the GIL at every call.
            function: Callable[..., int] = getattr(ctypes.PyDLL(path), name)
        except (AttributeError, OSError, TypeError):  # TypeError: Windows does not take None
            continue
        return function
    raise AttributeError(name)


def _acts_on_torch(runtime: _Runtime) -> bool:
    """Try it in a new thread, so that this thread's counts do not change."""
    seen: list[tuple[int, int]] = []
    trying = threading.Lock()
    trying.acquire()

    def attempt() -> None:
        try:
            torch.get_num_threads()
            for threads in (2, 1):
                runtime.set(threads)
                seen.append((torch.get_num_threads(), runtime.get_mkl() or threads))
        finally:
            trying.release()

    _thread.start_new_thread(attempt, ())
    with trying:
        return seen == [(2, 2), (1, 1)]


def _ignore(threads: int) -> int:
    return 0


def _nothing() -> int:
    return 0
