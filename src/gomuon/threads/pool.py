"""Worker threads that stop when their caller stops, and torch's thread count for one thread only.

Ctrl-C raises KeyboardInterrupt in the main thread, between any two of its instructions. Python's
own threads, futures and pools do not survive that: a lock may stay taken, or a forgotten thread
waits for ever and keeps the process from ending. So the caller's side does only what can be
repeated after an interrupt (set a flag, take a lock, put into a queue), and the threads are those
of `_thread`, which start in one instruction and end with the process.
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
    """Threads that wait for calls; torch's operations use `threads_each` threads in each."""

    def __init__(self, threads_each: int) -> None:
        self._threads_each = threads_each
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._started = 0
        self._starting = threading.Lock()

    def grow(self, size: int) -> None:
        """Have at least `size` threads."""
        if self._started >= size:
            return
        with self._starting:
            while self._started < size:
                _thread.start_new_thread(_serve, (self._calls, self._threads_each))
                # Counted after the start: an interrupt in between leaves one thread too many, which
                # is harmless. One too few would leave calls waiting for ever.
                self._started += 1

    def submit(self, call: "_Call[Any]") -> None:
        """Queue a call for the first free thread."""
        self._calls.put(call)


def _serve(calls: "SimpleQueue[_Call[Any]]", threads_each: int) -> None:
    ThreadCount().set(threads_each)
    while True:
        call = calls.get()
        call.run()
        del call  # it holds tensors


class Calls(Generic[Result]):
    """Calls that a pool runs side by side."""

    def __init__(self, calls: Sequence[Callable[[], Result]]) -> None:
        self._end = _End()
        self._calls = [_Call(call, self._end) for call in calls]

    def results(self, pool: Pool, size: int) -> Iterator[Result]:
        """Each call's result in order, on `size` threads; no call runs after this has ended."""
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
        """Start no more calls and wait for the running ones, even if the waiting is interrupted."""
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
    """Whether the calls have been ended; an object of its own, to avoid a reference cycle."""

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
        """Make the call unless it has been ended; runs in a thread of the pool."""
        # Set `begun` before looking at the end: either `Calls.end` sees `begun`, or this sees the
        # end. The other order could miss both.
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
        """Wait until the call has run; may be repeated."""
        with self._running:
            pass

    def result(self) -> Result:
        """What the call returned, or raise what it raised; may be asked once."""
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
# `torch.set_num_threads` also sets the count that threads started later begin with: a data loader's
# thread started meanwhile would keep it for ever. The counts are kept per thread by the OpenMP
# runtime and by MKL. Only those are set here.


@dataclass(frozen=True)
class _Runtime:
    set_openmp: Callable[[int], object]
    set_mkl: Callable[[int], int]  # returns the previous count; 0 stands for MKL's own choice
    get_mkl: Callable[[], int]

    def set(self, threads: int) -> int:
        self.set_openmp(threads)
        return self.set_mkl(threads)


def can_set_threads() -> bool:
    """Whether a thread's count can be set without changing any other thread's."""
    return _runtime() is not None


class ThreadCount:
    """The calling thread's count, to be set and put back; needs `can_set_threads()`."""

    def __init__(self) -> None:
        runtime = _runtime()
        assert runtime is not None
        self._runtime = runtime
        # A thread's first read sets its count to the process's: read before setting it.
        self._openmp = torch.get_num_threads()
        self._mkl = runtime.get_mkl()

    def set(self, threads: int) -> None:
        """Compute on `threads` threads; call it once, because `put_back` undoes only the last."""
        self._mkl = self._runtime.set(threads)

    def put_back(self) -> None:
        """Restore the count; may be repeated."""
        self._runtime.set_openmp(self._openmp)
        self._runtime.set_mkl(self._mkl)


@functools.cache
def _runtime() -> _Runtime | None:
    """The functions torch itself calls; None where they are not found or do not act on torch."""
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
    """The C function torch calls by this name, found as the linker finds it: preloaded ones first.

    Raises:
        AttributeError: there is none.
    """
    for path in (None, torch._C.__file__):
        try:
            # Not CDLL, which lets other threads run at every call.
            function: Callable[..., int] = getattr(ctypes.PyDLL(path), name)
        except (AttributeError, OSError, TypeError):  # TypeError: Windows does not take None
            continue
        return function
    raise AttributeError(name)


def _acts_on_torch(runtime: _Runtime) -> bool:
    """Try it in a new thread, so that this thread's counts stay as they are."""
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
