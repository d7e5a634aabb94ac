"""Matrices shared out among threads give what the plain call gives."""

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon import KFAC, GoMuon, Muon
from gomuon.errors import DecompositionError
from gomuon.functional import inverse_root, polar
from gomuon.functional.linalg import decompose
from gomuon.threads.spreading import concurrently, cores_for_workers, spread
from tests.models import mlp

pytestmark = pytest.mark.usefixtures("two_threads")


def who_and_square(seen: set[int], X: Tensor) -> tuple[Tensor, Tensor]:
    seen.add(threading.get_ident())
    assert torch.get_num_threads() == 1
    return X @ X, X.sum((-2, -1))


def test_the_result_is_the_plain_call_s_in_order() -> None:
    X, seen = torch.randn(9, 70, 70), set[int]()
    square, total = spread(lambda part: who_and_square(seen, part), X)
    torch.testing.assert_close(square, X @ X)
    torch.testing.assert_close(total, X.sum((-2, -1)))
    assert threading.get_ident() not in seen


def test_little_work_stays_in_its_thread() -> None:
    X, seen = torch.randn(200, 8, 8), set[int]()

    def note(part: Tensor) -> tuple[Tensor]:
        seen.add(threading.get_ident())
        return (part,)

    spread(note, X)
    assert seen == {threading.get_ident()}


def test_nobody_else_s_threads_are_touched() -> None:
    spread(lambda part: (part,), torch.randn(4, 70, 70))
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [2]
    assert torch.get_num_threads() == 2


def test_decompositions_agree_with_one_thread() -> None:
    X = torch.randn(2, 3, 80, 72)
    S = X.mT @ X + torch.eye(72)
    several = polar(X), polar(X, "canonical"), inverse_root(S, 0.25)
    torch.set_num_threads(1)
    alone = polar(X), polar(X, "canonical"), inverse_root(S, 0.25)
    for one, other in zip(several, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    S = torch.eye(70).repeat(4, 1, 1)
    S[2, 3, 4] = torch.nan
    with pytest.raises(DecompositionError, match="NaN"):
        inverse_root(S, 0.25)

    def fail(part: Tensor) -> tuple[Tensor]:
        raise torch.linalg.LinAlgError("no")

    with pytest.raises(DecompositionError, match="also not in float64"):
        decompose(fail, torch.randn(4, 70, 70))


def test_gradients_flow_as_through_the_plain_call() -> None:
    X = torch.randn(3, 70, 70, dtype=torch.float64, requires_grad=True)
    (square,) = spread(lambda part: (part @ part,), X)
    square.sum().backward()
    assert X.grad is not None
    assert X.grad.any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_threads_of_its_own() -> None:
    spread(lambda part: (part,), torch.randn(4, 70, 70))  # the parent has its pool
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        # A copy needs no OpenMP region, which a forked child may not enter.
        (copy,) = spread(lambda part: (part,), torch.ones(4, 70, 70))
        os._exit(0 if len(copy) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cores_are_lent_and_given_back() -> None:
    def work() -> None:
        assert torch.get_num_threads() == 1
        seen = set[int]()
        spread(lambda part: who_and_square(seen, part), torch.randn(4, 70, 70))
        assert threading.get_ident() not in seen
        with cores_for_workers():  # within itself it changes nothing
            pass
        (threads,) = spread(lambda part: (part * torch.get_num_threads(),), torch.ones(1, 1, 1))
        assert threads.item() == 2  # what is not shared out may use every core
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cores_for_workers():
        work()
    assert torch.get_num_threads() == 2


def test_concurrent_calls_give_what_calls_in_turn_give() -> None:
    batches = [torch.randn(b, 70, 70) for b in (5, 1, 3)]
    calls = [partial(polar, batch) for batch in batches]
    in_turn = list(concurrently(calls))
    with cores_for_workers():
        together = list(concurrently(calls))
    for one, other in zip(together, in_turn, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 5), (4, 3)])
def test_only_the_users_thread_computes_on_several_cores(sizes: tuple[int, ...]) -> None:
    """A second thread on several cores would slow down every later operation of the process."""
    seen: list[tuple[int, int]] = []

    def note(part: Tensor) -> tuple[Tensor]:
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return (part,)

    calls = [partial(spread, note, torch.randn(size, 70, 70)) for size in sizes]
    list(concurrently(calls))  # one after another, in this thread or shared out
    with cores_for_workers():
        list(concurrently(calls))
    others = [threads for who, threads in seen if who != threading.get_ident()]
    assert others
    assert set(others) == {1}


def test_few_matrices_stay_on_torchs_own_threads() -> None:
    torch.set_num_threads(8)
    seen: list[int] = []

    def note(part: Tensor) -> tuple[Tensor]:
        seen.append(torch.get_num_threads())
        return (part,)

    spread(note, torch.randn(4, 70, 70))
    assert seen == [8], "four matrices on eight cores"
    seen.clear()
    spread(note, torch.randn(5, 70, 70))
    assert seen == [1] * 5


def test_calls_in_turn_wait_until_they_are_asked() -> None:
    called: list[int] = []
    results = concurrently([partial(called.append, 1), partial(called.append, 2)])
    next(results)
    assert called == [1]


def test_an_error_in_a_concurrent_call_reaches_the_caller() -> None:
    nan = torch.full((3, 70, 70), torch.nan)
    with cores_for_workers(), pytest.raises(DecompositionError):
        list(concurrently([partial(inverse_root, nan, 0.25)] * 2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("method", [GoMuon, Muon, KFAC])
def test_a_step_on_two_threads_is_the_step_on_one(method: Any) -> None:
    ends = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        x = torch.randn(200, 72, dtype=torch.float64)
        model = mlp(72, 72, 96, 72, 72, bias=False)
        optimizer = method(model, lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - x.roll(1, 0)).square().mean().backward()
            optimizer.step()
        assert torch.get_num_threads() == threads
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
