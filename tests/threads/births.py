"""A script: threads are born all the while a process takes its first steps, and look at torch."""

import threading
import time

import torch

from gomuon import GoMuon
from gomuon.threads import pool
from tests.models import mlp

OF_THE_USER = 3  # neither one, which the step computes on, nor this machine's number


def numbers() -> tuple[int, int]:
    """Of this thread: torch's own, and MKL's (0 where torch has no MKL)."""
    runtime = pool._runtime()
    assert runtime is not None
    return torch.get_num_threads(), runtime.get_mkl()


def main() -> None:
    """Print how many threads were born, and which numbers they and this one saw."""
    torch.set_num_threads(OF_THE_USER)
    model = mlp(72, 72, 96, 72, 72, bias=False)
    optimizer = GoMuon(model, lr=0.01)
    x = torch.randn(200, 72, dtype=torch.float64)
    seen: list[int] = []
    over = threading.Event()

    def look(wait: float) -> None:
        time.sleep(wait)
        seen.append(torch.get_num_threads())

    def give_birth() -> None:
        born: list[threading.Thread] = []
        while not over.is_set():
            # Some look at once, some when the step they were born in may be over.
            born.append(threading.Thread(target=look, args=(len(born) % 4 * 0.003,)))
            born[-1].start()
            time.sleep(0.0005)
        for thread in born:
            thread.join()

    mother = threading.Thread(target=give_birth)
    mother.start()
    for _ in range(30):
        optimizer.zero_grad()
        (model(x) - x.roll(1, 0)).square().mean().backward()
        before = numbers()
        optimizer.step()
        assert numbers() == before, (numbers(), before)
    over.set()
    mother.join()
    print(len(seen), sorted(set(seen)))


if __name__ == "__main__":
    main()
