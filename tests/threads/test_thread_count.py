"""A step's number of threads is its own: no other thread ever sees it, and it is put back."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from gomuon import GoMuon
from gomuon.threads import pool, spreading
from gomuon.threads.pool import ThreadCount, can_set_threads
from gomuon.threads.spreading import concurrently, cores_for_workers, spread
from tests.models import mlp
from tests.threads.births import OF_THE_USER, numbers
from tests.threads.processes import run_script

pytestmark = pytest.mark.usefixtures("two_threads")


def test_threads_born_during_first_steps_have_the_user_s_number() -> None:
    born, seen = run_script("tests.threads.births").split(maxsplit=1)
    assert int(born) > 20
    assert seen.strip() == f"[{OF_THE_USER}]"


def of_a_new_thread() -> tuple[int, int]:
    """What a thread sees that is born now."""
    seen: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: seen.append(numbers()))
    thread.start()
    thread.join()
    return seen[0]


def test_only_this_thread_computes_on_one() -> None:
    assert can_set_threads()
    here, elsewhere = numbers(), of_a_new_thread()
    own = ThreadCount()
    own.set(1)
    try:
        assert numbers() == (1, min(1, here[1]))
        assert of_a_new_thread() == elsewhere
    finally:
        own.put_back()
    assert numbers() == here
    own.put_back()
    assert numbers() == here


def test_mkl_s_own_choice_is_put_back_as_such() -> None:
    runtime = pool._runtime()
    assert runtime is not None
    before = runtime.set_mkl(0)
    own = ThreadCount()
    own.set(1)
    own.put_back()
    assert runtime.set_mkl(before) == 0


@pytest.mark.parametrize("operation", ["product", "decomposition", "entries"])
def test_one_thread_is_one_core(operation: str) -> None:
    X = torch.randn(1000, 1000)
    work = {
        "product": lambda: X @ X,
        "decomposition": lambda: torch.linalg.eigh(X[:300, :300] + X[:300, :300].T),
        "entries": lambda: X.exp(),
    }[operation]
    with cores_for_workers():
        time.sleep(0.05)  # threads of earlier operations spin on for a while
        wall, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < 0.2:
            work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert cpu < 1.3 * wall


def test_workers_compute_on_one_and_coordinators_too() -> None:
    seen: list[tuple[int, int]] = []

    def note(part: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(numbers())
        return (part,)

    spread(note, torch.randn(4, 70, 70))
    with cores_for_workers():
        list(concurrently([lambda: seen.append(numbers())] * 2))
    assert set(seen) == {(1, min(1, numbers()[1]))}


@pytest.fixture
def _unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No OpenMP runtime to be found."""

    def missing(name: str) -> None:
        raise AttributeError(name)

    monkeypatch.setattr(pool, "_symbol", missing)
    pool._runtime.cache_clear()
    yield
    pool._runtime.cache_clear()


@pytest.mark.usefixtures("_unreachable")
def test_where_numbers_cannot_be_set_nothing_is() -> None:
    seen = set[int]()

    def note(part: torch.Tensor) -> tuple[torch.Tensor]:
        seen.add(threading.get_ident())
        assert torch.get_num_threads() == 2
        return (part,)

    with cores_for_workers():
        spread(note, torch.randn(4, 70, 70))
        list(concurrently([lambda: note(torch.ones(1))] * 2))
        assert spreading._this_thread.cores == 0
    assert seen == {threading.get_ident()}
    model = mlp(72, 72, 72, bias=False)
    optimizer = GoMuon(model, lr=0.01)
    model(torch.randn(9, 72, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    assert torch.get_num_threads() == 2


def test_a_runtime_that_does_not_act_on_torch_is_not_used() -> None:
    other = pool._Runtime(lambda threads: None, lambda threads: 0, lambda: 0)
    assert not pool._acts_on_torch(other)
