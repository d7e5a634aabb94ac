"""Captured sums leave for their owners during the backward pass, and stay exact."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon
from gomuon.distributed import stream_layout
from gomuon.distributed.owners import Owners
from gomuon.distributed.stream import SumStream
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, weights, wrapped

# ---- memory --------------------------------------------------------------------------------------

WIDTH, LAYERS = 384, 24
UNIT = 2 * WIDTH * WIDTH * 4  # Σxxᵀ and Σδδᵀ of one layer, float32


class InStep(torch.autograd.Function):
    """The identity, at which the ranks' backward passes wait for each other, and for messages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        dist.barrier()
        time.sleep(0.03)
        return g


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)  # AdamW's

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = InStep.apply(x + torch.tanh(layer(x)))
        return self.head(x)


def stream_of(optimizer: MatrixOptimizer) -> SumStream:
    team = optimizer._team()
    assert isinstance(team, Owners)
    assert team._stream is not None
    return team._stream


def held(optimizer: MatrixOptimizer) -> int:
    """Bytes of captured sums that this rank has."""
    found: dict[int, Tensor] = {}
    for capture in optimizer._capture.groups:
        inputs = [s for led in capture.shared._inputs_by_leader.values() for s in led]
        hooks = [hook for hooks in capture._hooks.values() for hook in hooks]
        totals = [s.total for s in inputs]
        totals += [probe.total for h in hooks for probe in (h.inputs, h.gradients)]
        found |= {id(t.grad): t.grad for t in totals if t.grad is not None}
    return sum(total.numel() * total.element_size() for total in found.values())


def peaks(place: Place, kind: str, streams: bool) -> list[tuple[int, int]]:
    """The most bytes of sums, without and with messages on their way, in two refresh steps."""
    model = wrapped(Deep(), kind)
    optimizer = GoMuon(model, refresh_every=1)
    stream = stream_of(optimizer)
    if not streams:
        optimizer._capture.listen(None)
    most = [0, 0]

    def look(*_: Any) -> None:
        here = held(optimizer)
        most[0] = max(most[0], here)
        most[1] = max(most[1], here + stream.bytes_in_flight)

    for hooks in optimizer._capture.groups[0]._hooks.values():
        hooks[0].gradients.total.register_post_accumulate_grad_hook(look)
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step * place.size + place.rank)
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        look()
        found.append((most[0], most[1]))
        most[:] = [0, 0]
        optimizer.step()
    return found


def all_peaks(place: Place) -> dict[tuple[str, bool], list[tuple[int, int]]]:
    return {
        (kind, streams): peaks(place, kind, streams)
        for kind in ("ddp", "fsdp")
        for streams in (True, False)
    }


def test_a_rank_holds_the_sums_of_two_units_and_not_of_all(tmp_path: Path) -> None:
    for rank, answer in enumerate(launch(2, all_peaks, tmp_path)):
        for kind in ("ddp", "fsdp"):
            print(rank, kind, [(a / UNIT, b / UNIT) for a, b in answer[kind, True]])
            for most, with_messages in answer[kind, True]:  # the first step already
                assert UNIT <= most <= with_messages <= 2 * UNIT, (rank, kind)
            for most, _ in answer[kind, False]:
                assert most == LAYERS * UNIT, (rank, kind)
