"""Bytes of tensors that are held, and the peak of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon.lab.bench.memory import held_bytes, peak_bytes


def test_bytes_held_count_a_storage_once_and_leave_out_what_is_not_the_optimizers() -> None:
    class Kept:
        __slots__ = ("tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    parameter, buffer = torch.ones(100), torch.ones(10)
    holder = {
        "views": [buffer, buffer[:3], buffer.view(2, 5)],
        "inside": (Kept(torch.ones(5, dtype=torch.float64)),),
        "model": nn.Linear(50, 50),
        parameter: parameter[:10],
    }
    assert held_bytes(holder, [parameter]) == 4 * 10 + 8 * 5


def test_a_peak_misses_nothing_that_threads_would_allocate() -> None:
    """Records are of one thread; a step that shares out its matrices must not look lighter."""
    X = torch.randn(8, 64, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = peak_bytes(lambda: gomuon.functional.polar(X))
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert shared == peak_bytes(lambda: gomuon.functional.polar(X))
    finally:
        torch.set_num_threads(before)
    assert shared >= X.nbytes


@pytest.mark.parametrize("count", [1, 3])
def test_peaks_are_of_what_is_alive_together(count: int) -> None:
    def work() -> None:
        alive = [torch.empty(1000) for _ in range(count)]
        del alive
        torch.empty(1000)

    first: Callable[[], object] = work
    assert peak_bytes(first) == count * 4000
