"""Computes independent matrices in parallel: LAPACK uses several cores badly on a small matrix.

Our threads compute on one core each. With a second thread that uses several, OpenMP would count
more threads than cores and stop spinning while it waits, in the whole process and forever: every
later operation of the user's model would wait for its threads to wake up.
"""

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

BatchFunction = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")

# The smallest work, as m·n·min(m, n), that is worth passing to another thread.
_WORTHWHILE = 64**3
_SMALL = 2**22  # a model is small up to this number of parameter elements


class _ThreadState(threading.local):
    cores: int = 0  # cores for workers while this thread computes on one core
    coordinates: bool = False  # whether this thread runs one of several concurrent calls
    calls: tuple[Calls[Any], ...] = ()  # calls started since then


_this_thread = _ThreadState()


def spread(function: BatchFunction, X: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
    """`function(X, *more)` of batches [b, …]; torch's threads share the matrices.

    `function` must treat the matrices of a batch independently. It is simply called in this thread
    on accelerators, for little work, and if autograd or a dispatch mode is active (both work in one
    thread only).
    """
    threads = _this_thread.cores or torch.get_num_threads()
    m, n = X.shape[-2:]
    piece = -(-_WORTHWHILE // max(1, m * n * min(m, n)))
    if threads == 1 or X.device.type != "cpu" or _needs_this_thread(X) or not can_set_threads():
        return function(X, *more)
    workers = min(threads, -(-len(X) // piece))
    if 2 * workers <= threads or workers == 1:  # few matrices are better off with several cores
        with _all_cores():
            return function(X, *more)
    # One piece per worker, because threads wait for each other between operations.
    piece = -(-len(X) // workers)
    pieces: list[Sequence[Tensor | None]] = [X.split(piece)]
    for other in more:
        pieces.append([None] * len(pieces[0]) if other is None else other.split(piece))
    calls = [
        functools.partial(_without_grad, function, *tensors)
        for tensors in zip(*pieces, strict=True)
    ]
    pool = _workers(threads, os.getpid())
    parts = list(Calls(calls).results(pool, workers))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def concurrently(calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """The results of calls that use `spread`. Several calls run in parallel to use all cores.

    Without `cores_for_workers`, each call runs when its result is read, so that only one result is
    in memory at a time. No call runs any more after the results have been read, their iterator is
    closed, or the cores are given back.
    """
    cores = _this_thread.cores
    if len(calls) < 2 or not cores or _this_thread.coordinates or _len_torch_dispatch_stack():
        return (call() for call in calls)
    started = Calls([functools.partial(_with_cores, cores, call) for call in calls])
    _this_thread.calls += (started,)
    # A call either computes in its own thread or waits for workers that compute. So as many calls
    # as cores keep all cores busy. More calls would only need more memory for results.
    return started.results(_coordinators(cores, os.getpid()), min(cores, len(calls)))


def _with_cores(cores: int, call: Callable[[], Result]) -> Result:
    _this_thread.cores, _this_thread.coordinates = cores, True
    try:
        with torch.no_grad():
            return call()
    finally:
        _this_thread.cores, _this_thread.coordinates = 0, False


def cores_for_workers(elements: int = 0) -> AbstractContextManager[None]:
    """Compute on one core in this thread, so that the other cores are free for workers.

    OpenMP's threads keep spinning for some milliseconds after every parallel operation, on the
    cores that workers need. For small models, up to 2²² elements, this costs more than OpenMP
    gains.

    Enter it twice (`with cores, cores:`): if an interrupt comes while the cores are given back, the
    second exit gives them back.
    """
    return _CoresForWorkers() if elements <= _SMALL else nullcontext()


class _CoresForWorkers(AbstractContextManager[None]):
    def __init__(self) -> None:
        self._own: ThreadCount | None = None

    def __enter__(self) -> None:
        threads = torch.get_num_threads()
        if threads == 1 or _this_thread.cores or not can_set_threads():
            return
        try:
            self._own = ThreadCount()
            self._own.set(1)
            _this_thread.cores = threads
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *failure: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """May be called again, if an interrupt has stopped it."""
        if self._own is None:
            return
        try:
            for calls in _this_thread.calls:
                calls.end()
            _this_thread.calls = ()
        finally:
            _this_thread.cores = 0
            self._own.put_back()
        self._own = None


@contextmanager
def _all_cores() -> Iterator[None]:
    """Use all cores for one operation that is not divided, but only in the user's thread."""
    lent = _this_thread.cores
    if not lent or _this_thread.coordinates:
        yield
        return
    own = ThreadCount()
    own.set(lent)
    try:
        yield
    finally:
        own.put_back()


def _needs_this_thread(X: Tensor) -> bool:
    return (torch.is_grad_enabled() and X.requires_grad) or _len_torch_dispatch_stack() > 0


def _without_grad(function: BatchFunction, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    with torch.no_grad():  # a thread starts with autograd on, whatever its caller's mode
        return function(*tensors)


@functools.cache
def _workers(cores: int, process: int) -> Pool:
    """One pool per number of cores, so that no more threads run than the user allows.

    `process` is part of the key because a forked child inherits no threads.
    """
    return Pool()


@functools.cache
def _coordinators(cores: int, process: int) -> Pool:
    """Threads that pass work to workers and wait for it. Workers must never wait for calls."""
    return Pool()
