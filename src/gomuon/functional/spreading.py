"""Independent matrices side by side: LAPACK makes poor use of several cores on one small matrix."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from gomuon.functional.crew import Crew, Work
from gomuon.functional.own_threads import OwnThreads, settable

Function = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")

# m·n·min(m, n) of the least work that is worth handing to another thread.
_WORTHWHILE = 64**3


class _Lent(threading.local):
    cores: int = 0  # a thread leaves to workers while it computes on one
    coordinates: bool = False  # it answers one of several concurrent calls
    work: tuple[Work[Any], ...] = ()  # begun meanwhile


_lent = _Lent()


def spread(function: Function, X: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
    """`function(X, *more)` of batches [b, …], their matrices shared out among torch's threads.

    `function` treats the matrices of a batch apart from each other. On accelerators, for little
    work, and where autograd or a dispatch mode watches (both belong to one thread), it is a plain
    call.
    """
    threads = _lent.cores or torch.get_num_threads()
    m, n = X.shape[-2:]
    piece = -(-_WORTHWHILE // max(1, m * n * min(m, n)))
    if threads == 1 or X.device.type != "cpu" or _is_watched(X) or not settable():
        return function(X, *more)
    if len(X) <= piece:
        with _cores_back():
            return function(X, *more)
    workers = min(threads, -(-len(X) // piece))
    piece = -(-len(X) // workers)  # no more, since threads wait for each other between operations
    pieces: list[Sequence[Tensor | None]] = [X.split(piece)]
    for other in more:
        pieces.append([None] * len(pieces[0]) if other is None else other.split(piece))
    calls = [
        functools.partial(_quietly, function, *tensors) for tensors in zip(*pieces, strict=True)
    ]
    crew = _workers(threads, threads // workers, os.getpid())
    parts = list(Work(calls).results(crew, workers))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def concurrently(calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """The results of calls that spread their work; the pieces of one fill the gaps of another.

    Unless cores are set aside for workers, each is called when its result is asked for, so that
    only one of them is held at a time. None is under way any more when the results have been read,
    when their iterator is closed, or when the cores are given back.
    """
    cores = _lent.cores
    if len(calls) < 2 or not cores or _lent.coordinates or _len_torch_dispatch_stack():
        return (call() for call in calls)
    work = Work([functools.partial(_with_cores, cores, call) for call in calls])
    _lent.work += (work,)
    # A call either computes in its own thread or waits for workers who do, so as many calls as
    # there are cores keep all of them busy; more would only hold more results at a time.
    return work.results(_coordinators(cores, os.getpid()), min(cores, len(calls)))


def _with_cores(cores: int, call: Callable[[], Result]) -> Result:
    _lent.cores, _lent.coordinates = cores, True
    try:
        with torch.no_grad():
            return call()
    finally:
        _lent.cores, _lent.coordinates = 0, False


def cores_for_workers() -> AbstractContextManager[None]:
    """Compute on one core here, so that the others are free when workers are called.

    OpenMP's threads go on spinning for some milliseconds after every parallel operation, on the
    cores that workers need. Where operations are small, that costs more than they gain.

    Entered twice (`with cores, cores:`) it also holds against an interrupt that comes while cores
    are being given back: the second end then does it.
    """
    return _Lending()


class _Lending(AbstractContextManager[None]):
    def __init__(self) -> None:
        self._own: OwnThreads | None = None

    def __enter__(self) -> None:
        threads = torch.get_num_threads()
        if threads == 1 or _lent.cores or not settable():
            return
        try:
            self._own = OwnThreads()
            self._own.set(1)
            _lent.cores = threads
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *failure: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """All of it may be done again, where an interrupt cut it short."""
        if self._own is None:
            return
        try:
            for work in _lent.work:
                work.end()
            _lent.work = ()
        finally:
            _lent.cores = 0
            self._own.put_back()
        self._own = None


@contextmanager
def _cores_back() -> Iterator[None]:
    """All cores for one operation that is not shared out."""
    lent = _lent.cores
    if not lent:
        yield
        return
    own = OwnThreads()
    own.set(lent)
    try:
        yield
    finally:
        own.put_back()


def _is_watched(X: Tensor) -> bool:
    return (torch.is_grad_enabled() and X.requires_grad) or _len_torch_dispatch_stack() > 0


def _quietly(function: Function, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    with torch.no_grad():  # a thread begins with autograd on, whatever its caller's mode
        return function(*tensors)


@functools.cache
def _workers(cores: int, threads_each: int, process: int) -> Crew:
    """By cores, so that no more threads work than the user has; a forked child inherits none."""
    return Crew(threads_each)


@functools.cache
def _coordinators(cores: int, process: int) -> Crew:
    """Threads that hand out work and wait for it; no workers, who must never wait for others."""
    return Crew(1)
