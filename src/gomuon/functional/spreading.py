"""Independent matrices side by side: LAPACK makes poor use of several cores on one small matrix."""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

# m·n·min(m, n) of the least work that is worth handing to another thread.
_WORTHWHILE = 64**3


def spread(function: Callable[[Tensor], tuple[Tensor, ...]], X: Tensor) -> tuple[Tensor, ...]:
    """`function(X)` of a batch X [b, m, n], its matrices shared out among torch's threads.

    `function` treats the matrices of a batch apart from each other. On accelerators, for little
    work, and where autograd or a dispatch mode watches (both belong to one thread), it is a plain
    call.
    """
    threads = torch.get_num_threads()
    m, n = X.shape[-2:]
    piece = -(-_WORTHWHILE // max(1, m * n * min(m, n)))
    if threads == 1 or len(X) <= piece or X.device.type != "cpu" or _is_watched(X):
        return function(X)
    workers = min(threads, -(-len(X) // piece))
    pool = _pool(workers, threads // workers, threads, os.getpid())
    parts = list(pool.map(functools.partial(_quietly, function), X.split(piece)))
    return tuple(torch.cat(factors) for factors in zip(*parts, strict=True))


def _is_watched(X: Tensor) -> bool:
    return (torch.is_grad_enabled() and X.requires_grad) or _len_torch_dispatch_stack() > 0


def _quietly(function: Callable[[Tensor], tuple[Tensor, ...]], X: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():  # a thread begins with autograd on, whatever its caller's mode
        return function(X)


@functools.lru_cache(maxsize=8)  # by process too: a forked child inherits no threads
def _pool(workers: int, threads_each: int, threads: int, process: int) -> ThreadPoolExecutor:
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
