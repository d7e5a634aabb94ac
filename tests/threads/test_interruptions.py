"""Ctrl-C during a step: nothing goes on, all is put back, and the process can end."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from gomuon.threads import spreading
from gomuon.threads.pool import Calls, Pool
from gomuon.threads.spreading import concurrently, cores_for_workers, spread
from tests.threads.processes import run_script

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize(("how", "least"), [("timer", 20), ("instructions", 50)])
def test_a_first_step_may_be_interrupted_anywhere(how: str, least: int) -> None:
    assert int(run_script("tests.threads.interruptions", how)) >= least


def slowly(done: list[int], number: int) -> int:
    time.sleep(0.05)
    done.append(number)
    return number


def test_a_failing_piece_is_raised_when_no_other_runs() -> None:
    done: list[int] = []

    def half_of_them_fail(part: Tensor) -> tuple[Tensor]:
        if part[0, 0, 0] == 0:
            raise ZeroDivisionError
        slowly(done, 1)
        return (part,)

    X = torch.ones(2, 70, 70)
    X[0] = 0
    with pytest.raises(ZeroDivisionError):
        spread(half_of_them_fail, X)
    assert done == [1] or not done  # finished, or never begun
    finished = list(done)
    time.sleep(0.1)
    assert done == finished


def test_results_that_nobody_reads_on_are_not_computed_on() -> None:
    done: list[int] = []
    with cores_for_workers():
        results = concurrently([partial(slowly, done, number) for number in range(8)])
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        finished = list(done)
        time.sleep(0.15)
        assert done == finished
        assert len(done) < 8


def test_cores_are_given_back_when_nobody_computes_on_them() -> None:
    done: list[int] = []
    with cores_for_workers():
        results = concurrently([partial(slowly, done, number) for number in range(8)])
        next(results)  # and the iterator is kept, as a traceback would
    finished = list(done)
    time.sleep(0.15)
    assert done == finished
    with pytest.raises(RuntimeError, match="after its calls had ended"):
        list(results)


def test_an_error_ends_the_other_calls() -> None:
    done: list[int] = []

    def fail() -> int:
        raise ZeroDivisionError

    calls: list[Callable[[], int]] = [fail, *[partial(slowly, done, n) for n in range(8)]]
    with cores_for_workers(), pytest.raises(ZeroDivisionError):
        list(concurrently(calls))
    finished = list(done)
    time.sleep(0.15)
    assert done == finished
    assert len(done) < 8


def test_waiting_goes_on_through_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    calls, pool = Calls([partial(slowly, done, 1)]), Pool()
    (call,) = calls._calls
    pool.grow(1)
    pool.submit(call)
    while not call.begun:
        time.sleep(0.001)
    interrupts = iter([KeyboardInterrupt(), KeyboardInterrupt()])
    wait = call.wait

    def interrupted() -> None:
        for interrupt in interrupts:
            raise interrupt
        wait()

    monkeypatch.setattr(call, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls.end()
    assert done == [1]


def test_no_more_threads_coordinate_than_there_are_cores_or_calls() -> None:
    cores = 4
    torch.set_num_threads(cores)
    for calls, most in ((3, 3), (12, cores)):
        spreading._coordinators.cache_clear()
        seen = set[int]()

        def note(seen: set[int] = seen) -> None:
            time.sleep(0.01)
            seen.add(threading.get_ident())

        with cores_for_workers():
            list(concurrently([note] * calls))
        assert len(seen) <= most


def test_a_concurrent_call_may_have_concurrent_calls() -> None:
    def nested(number: int) -> list[int]:
        return list(concurrently([lambda: number, lambda: number + 1]))

    with cores_for_workers():
        assert list(concurrently([partial(nested, n) for n in range(4)])) == [
            [n, n + 1] for n in range(4)
        ]
