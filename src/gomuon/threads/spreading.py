"""Independent matrices side by side: LAPACK uses several cores badly on one small matrix."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from gomuon.threads.pool import Calls, Pool, ThreadCount, can_set_threads

Function = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")

# m·n·min(m, n) of the least work that is worth handing to another thread.
_WORTHWHILE = 64**3
_SMALL = 2**22  # elements of all parameters of a small model


class _Lent(threading.local):
    cores: int = 0  # cores this thread leaves to workers while it computes on one
    coordinates: bool = False  # whether it runs one of several concurrent calls
    calls: tuple[Calls[Any], ...] = ()  # started meanwhile


_lent = _Lent()


def spread(function: Function, X: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
    """`function(X, *more)` of batches [b, …], their matrices divided among torch's threads.

    `function` must treat the matrices of a batch independently. It is a plain call on accelerators,
    for little work, and where autograd or a dispatch mode is active (both belong to one thread).
    """
    threads = _lent.cores or torch.get_num_threads()
    m, n = X.shape[-2:]
    piece = -(-_WORTHWHILE // max(1, m * n * min(m, n)))
    if threads == 1 or X.device.type != "cpu" or _is_watched(X) or not can_set_threads():
        return function(X, *more)
    if len(X) <= piece:
        with _cores_back():
            return function(X, *more)
    workers = min(threads, -(-len(X) // piece))
    # One piece per worker: threads wait for each other between operations.
    piece = -(-len(X) // workers)
    pieces: list[Sequence[Tensor | None]] = [X.split(piece)]
    for other in more:
        pieces.append([None] * len(pieces[0]) if other is None else other.split(piece))
    calls = [
        functools.partial(_without_grad, function, *tensors)
        for tensors in zip(*pieces, strict=True)
    ]
    pool = _workers(threads, threads // workers, os.getpid())
    parts = list(Calls(calls).results(pool, workers))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def concurrently(calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """The results of calls that use `spread`; pieces of one call fill the gaps of another.

    Without `cores_for_workers`, each call runs when its result is asked for, so that only one
    result is held at a time. No call runs any more once the results have been read, their iterator
    is closed, or the cores are given back.
    """
    cores = _lent.cores
    if len(calls) < 2 or not cores or _lent.coordinates or _len_torch_dispatch_stack():
        return (call() for call in calls)
    started = Calls([functools.partial(_with_cores, cores, call) for call in calls])
    _lent.calls += (started,)
    # A call either computes in its own thread or waits for workers that do. So as many calls as
    # cores keep all cores busy; more would only hold more results at a time.
    return started.results(_coordinators(cores, os.getpid()), min(cores, len(calls)))


def _with_cores(cores: int, call: Callable[[], Result]) -> Result:
    _lent.cores, _lent.coordinates = cores, True
    try:
        with torch.no_grad():
            return call()
    finally:
        _lent.cores, _lent.coordinates = 0, False


def cores_for_workers(elements: int = 0) -> AbstractContextManager[None]:
    """Compute on one core in this thread, so that the others are free for workers.

    OpenMP's threads keep spinning for some milliseconds after every parallel operation, on the
    cores that workers need. For small models, up to 2²² elements, that costs more than they gain.

    Entered twice (`with cores, cores:`) it also holds if an interrupt comes while cores are being
    given back: the second exit then does it.
    """
    return _Lending() if elements <= _SMALL else nullcontext()


class _Lending(AbstractContextManager[None]):
    def __init__(self) -> None:
        self._own: ThreadCount | None = None

    def __enter__(self) -> None:
        threads = torch.get_num_threads()
        if threads == 1 or _lent.cores or not can_set_threads():
            return
        try:
            self._own = ThreadCount()
            self._own.set(1)
            _lent.cores = threads
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *failure: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """May be repeated, if an interrupt cut it short."""
        if self._own is None:
            return
        try:
            for calls in _lent.calls:
                calls.end()
            _lent.calls = ()
        finally:
            _lent.cores = 0
            self._own.put_back()
        self._own = None


@contextmanager
def _cores_back() -> Iterator[None]:
    """All cores for one operation that is not divided."""
    lent = _lent.cores
    if not lent:
        yield
        return
    own = ThreadCount()
    own.set(lent)
    try:
        yield
    finally:
        own.put_back()


def _is_watched(X: Tensor) -> bool:
    return (torch.is_grad_enabled() and X.requires_grad) or _len_torch_dispatch_stack() > 0


def _without_grad(function: Function, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    with torch.no_grad():  # a thread starts with autograd on, whatever its caller's mode
        return function(*tensors)


@functools.cache
def _workers(cores: int, threads_each: int, process: int) -> Pool:
    """One pool per number of cores, so that no more threads work than the user allows.

    `process` is part of the key because a forked child inherits no threads.
    """
    return Pool(threads_each)


@functools.cache
def _coordinators(cores: int, process: int) -> Pool:
    """Threads that hand out work and wait for it; workers must never wait for other calls."""
    return Pool(1)
