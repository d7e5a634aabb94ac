"""How many threads torch's operations use, for one Python thread alone.

`torch.set_num_threads` sets the calling thread's number, and also the number that every thread
begins with that asks for the first time later: a data loader's thread born meanwhile would keep it
for ever. The numbers themselves are kept per thread by the OpenMP runtime and, beside it, by MKL.
Here only those are set. Where they cannot be reached nothing is set at all (see `settable`).
"""

import _thread
import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Runtime:
    set_openmp: Callable[[int], object]
    set_mkl: Callable[[int], int]  # returns the number before; 0 stands for MKL's own choice
    get_mkl: Callable[[], int]

    def set(self, threads: int) -> int:
        self.set_openmp(threads)
        return self.set_mkl(threads)


def settable() -> bool:
    """Whether a thread's number can be set without changing any other's."""
    return _runtime() is not None


class OwnThreads:
    """The calling thread's number, to be set and put back; only where it is settable."""

    def __init__(self) -> None:
        runtime = _runtime()
        assert runtime is not None
        self._runtime = runtime
        # A thread's first look sets its number to the process's: look before setting it.
        self._openmp = torch.get_num_threads()
        self._mkl = runtime.get_mkl()

    def set(self, threads: int) -> None:
        """Compute on so many threads from now on; once, since `put_back` undoes only the last."""
        self._mkl = self._runtime.set(threads)

    def put_back(self) -> None:
        """As it was; any number of times."""
        self._runtime.set_openmp(self._openmp)
        self._runtime.set_mkl(self._mkl)


@functools.cache
def _runtime() -> _Runtime | None:
    """What torch itself calls, or None where it cannot be found or does not act on torch."""
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
    """A C function by the name torch calls it, looked up as the linker does: preloaded ones first.

    Raises:
        AttributeError: there is none.
    """
    for path in (None, torch._C.__file__):
        try:
            # Not CDLL, which lets other threads run at every call.
            function: Callable[..., int] = getattr(ctypes.PyDLL(path), name)
        except (AttributeError, OSError, TypeError):  # TypeError: Windows knows no None
            continue
        return function
    raise AttributeError(name)


def _acts_on_torch(runtime: _Runtime) -> bool:
    """Try it, in a thread of its own that takes its numbers with it."""
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

    _thread.start_new_thread(attempt, ())  # why not threading.Thread: see `crew`
    with trying:
        return seen == [(2, 2), (1, 1)]


def _ignore(threads: int) -> int:
    return 0


def _nothing() -> int:
    return 0
