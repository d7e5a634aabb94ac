"""Independent matrices side by side: LAPACK makes poor use of several cores on one small matrix."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

Function = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")

# m·n·min(m, n) of the least work that is worth handing to another thread.
_WORTHWHILE = 64**3


class _Lent(threading.local):
    cores: int = 0  # a thread leaves to workers while it computes on one


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
    if threads == 1 or X.device.type != "cpu" or _is_watched(X):
        return function(X, *more)
    if len(X) <= piece:
        with _cores_back():
            return function(X, *more)
    workers = min(threads, -(-len(X) // piece))
    piece = -(-len(X) // workers)  # no more, since threads wait for each other between operations
    pool = _pool(workers, threads // workers, os.getpid())
    pieces: list[Sequence[Tensor | None]] = [X.split(piece)]
    for other in more:
        pieces.append([None] * len(pieces[0]) if other is None else other.split(piece))
    parts = list(pool.map(functools.partial(_quietly, function), *pieces))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def concurrently(calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """The results of calls that spread their work; the pieces of one fill the gaps of another.

    Unless cores are set aside for workers, each is called when its result is asked for, so that
    only one of them is held at a time.
    """
    if len(calls) < 2 or not _lent.cores or _len_torch_dispatch_stack():
        return (call() for call in calls)
    pool = _coordinators(os.getpid())
    return pool.map(functools.partial(_with_cores, _lent.cores), calls)


def _with_cores(cores: int, call: Callable[[], Result]) -> Result:
    _lent.cores = cores
    with torch.no_grad():
        return call()


@functools.lru_cache(maxsize=1)
def _coordinators(process: int) -> ThreadPoolExecutor:
    """Threads that only hand out work and wait for it."""
    return _threads(16, 1)


@contextmanager
def cores_for_workers() -> Iterator[None]:
    """Compute on one core here, so that the others are free when workers are called.

    OpenMP's threads go on spinning for some milliseconds after every parallel operation, on the
    cores that workers need. Where operations are small, that costs more than they gain.
    """
    threads = torch.get_num_threads()
    if threads == 1 or _lent.cores:
        yield
        return
    _lent.cores = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _lent.cores = 0
        torch.set_num_threads(threads)


@contextmanager
def _cores_back() -> Iterator[None]:
    """All cores for one operation that is not shared out."""
    lent = _lent.cores
    if not lent:
        yield
        return
    torch.set_num_threads(lent)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _is_watched(X: Tensor) -> bool:
    return (torch.is_grad_enabled() and X.requires_grad) or _len_torch_dispatch_stack() > 0


def _quietly(function: Function, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    with torch.no_grad():  # a thread begins with autograd on, whatever its caller's mode
        return function(*tensors)


@functools.lru_cache(maxsize=8)  # by process too: a forked child inherits no threads
def _pool(workers: int, threads_each: int, process: int) -> ThreadPoolExecutor:
    return _threads(workers, threads_each)


def _threads(workers: int, threads_each: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="gomuon")
    started = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first look sets it to the process's number: look now
        torch.set_num_threads(threads_each)
        started.wait()

    for _ in range(workers):
        pool.submit(start)
    started.wait()
    # The workers' number is their own, but it is also what threads yet to come would begin with.
    torch.set_num_threads(threads)
    return pool
