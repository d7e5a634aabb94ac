"""Captured sums leave for their owners during the backward pass, and stay exact."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon
from gomuon.distributed import stream, stream_layout
from gomuon.distributed.owners import Owners
from gomuon.distributed.stream import SumStream
from gomuon.lab.costs.estimate import RankLayout, estimate_cost
from gomuon.lab.costs.planned_model import PlannedModel
from gomuon.lab.costs.traffic import Mesh
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.test_equality import experts
from tests.distributed.worlds import Weights, assert_alike, distance, weights, wrapped

# ---- memory --------------------------------------------------------------------------------------

WIDTH, LAYERS = 384, 24
WHOLE: dict[str, Any] = {"block_size": None}
UNIT = 2 * WIDTH * WIDTH * 4  # Σxxᵀ and Σδδᵀ of one layer, float32


WATCHED: list[SumStream] = []  # the streams whose messages a backward pass waits for


def settle() -> None:
    """Wait until this rank's messages have been sent, as layers of a real size would."""
    deadline = time.monotonic() + 20
    for watched in WATCHED:
        works: list[Any] = [*watched._messages]
        works += [] if watched._opening is None else [watched._opening[1]]
        while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
            time.sleep(0.001)


class InStep(torch.autograd.Function):
    """The identity, at which the ranks' backward passes wait for each other, and for messages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        dist.barrier()
        settle()
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
    optimizer = GoMuon(model, refresh_every=1, **WHOLE)
    messages = stream_of(optimizer)
    WATCHED[:] = [messages]
    if not streams:
        optimizer._capture.listen(None)
    most = [0, 0]

    def look(*_: Any) -> None:
        here = held(optimizer)
        most[0] = max(most[0], here)
        most[1] = max(most[1], here + messages.bytes_in_flight)

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
    about = PlannedModel("deep", Deep(), 8, 1.0, None, 1.0)
    planned = estimate_cost(
        "go-muon", about, RankLayout(Mesh(replicas=2)), {"refresh_every": 1, **WHOLE}
    )
    assert planned.moments == LAYERS * UNIT
    for rank, answer in enumerate(launch(2, all_peaks, tmp_path)):
        for kind in ("ddp", "fsdp"):
            for most, with_messages in answer[kind, True]:  # the first step already
                assert UNIT <= most <= with_messages <= 2 * UNIT, (rank, kind)
                assert with_messages < planned.held < planned.moments / 2
            for most, _ in answer[kind, False]:
                assert most == LAYERS * UNIT, (rank, kind)


def peaks_in_turns(place: Place) -> list[int]:
    """The most bytes of sums in each step: captured, on their way, and received as an owner."""
    model = wrapped(Deep(), "ddp")
    optimizer = GoMuon(model, **WHOLE)
    messages = stream_of(optimizer)
    WATCHED[:] = [messages]
    most = [0]

    def look(*_: Any) -> None:
        received = sum(t.numel() * t.element_size() for t in messages._totals.values())
        most[0] = max(most[0], held(optimizer) + messages.bytes_in_flight + received)

    for hooks in optimizer._capture.groups[0]._hooks.values():
        hooks[0].gradients.total.register_post_accumulate_grad_hook(look)
    found = []
    with eager():  # or one rank might send at its first turn and the other one only at its second
        for step in range(8):
            generator = torch.Generator().manual_seed(step * place.size + place.rank)
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
            look()
            found.append(most[0])
            most[0] = 0
            optimizer.step()
    return found


def test_in_turns_a_rank_also_receives_fewer_sums(tmp_path: Path) -> None:
    about = PlannedModel("deep", Deep(), 8, 1.0, None, 1.0)
    ranks = RankLayout(Mesh(replicas=2))
    planned = estimate_cost("go-muon", about, ranks, WHOLE)
    together = estimate_cost("go-muon", about, ranks, {"stagger": False, **WHOLE})
    assert planned.held < together.held / 2
    for answer in launch(2, peaks_in_turns, tmp_path):
        for step, most in enumerate(answer):
            assert UNIT <= most <= planned.cycle[step % 4].held, step


# ---- exactness -----------------------------------------------------------------------------------


@contextmanager
def eager() -> Iterator[list[int]]:
    """Every unit is a message of its own, and a small model's first one waits for the others.

    Gives the number of messages that were sent inside of backward passes.
    """
    inside = [0]
    real = stream_layout.BUCKET, SumStream._may_send, SumStream._send

    def may_send(self: SumStream) -> bool:
        if self._opening is None:
            self._open()
        self._check_opening()
        return bool(self._agreed)

    def send(self: SumStream, take: Any) -> None:
        inside[0] += torch._C._current_graph_task_id() != -1
        real[2](self, take)

    stream_layout.BUCKET = 1
    SumStream._may_send, SumStream._send = may_send, send  # type: ignore[method-assign]
    try:
        yield inside
    finally:
        stream_layout.BUCKET = real[0]
        SumStream._may_send, SumStream._send = real[1:]  # type: ignore[method-assign]


class Odd(nn.Module):
    """q, k and up share an input; a layer is used twice; two layers have one weight."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.q, self.k = nn.Linear(5, 6), nn.Linear(5, 6)
        self.block = nn.ModuleDict({"up": nn.Linear(5, 6), "twice": nn.Linear(6, 6)})
        self.one, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.double()

    def middle(self, hidden: Tensor) -> Tensor:
        hidden = self.block["twice"](torch.tanh(self.block["twice"](hidden)))
        return self.other(torch.tanh(self.one(hidden)))

    def forward(self, x: Tensor, mirrored: bool = False) -> Tensor:
        if mirrored:  # autograd visits what was last used first
            up, k, q = self.block["up"](x), self.k(x), self.q(x)
        else:
            q, k, up = self.q(x), self.k(x), self.block["up"](x)
        hidden = torch.tanh(q) * k + up
        if self.checkpoints:
            reentrant = self.checkpoints == "reentrant"
            hidden = checkpoint(self.middle, hidden, use_reentrant=reentrant)
        else:
            hidden = self.middle(hidden)
        if mirrored:
            right, left = self.right(hidden), self.left(hidden.sin())
        else:
            left, right = self.left(hidden.sin()), self.right(hidden)
        return self.head(torch.tanh(self.last(left * right)))


Backward = Callable[[nn.Module, MatrixOptimizer, Tensor, int], None]  # the last: number of ranks


def plain(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    (ranks * model(x).square().sum()).backward()


def mirrored(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    """Ranks go through the layers in different orders."""
    other = ranks > 1 and dist.get_rank() == 1
    (ranks * model(x, other).square().sum()).backward()


def micro_batches(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    for part in x.chunk(3):
        (ranks * model(part).square().sum()).backward()


def unsynchronised(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    first, second = x[:3], x[3:]
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            plain(model, optimizer, first, ranks)
    else:
        plain(model, optimizer, first, ranks)
    plain(model, optimizer, second, ranks)


def repeated(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    """Two backward passes through one graph."""
    loss = ranks * model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def masked(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    with optimizer.statistics_mask(x[:, 0] > -0.5):
        plain(model, optimizer, x, ranks)


def dropped(model: nn.Module, optimizer: MatrixOptimizer, x: Tensor, ranks: int) -> None:
    """A backward pass whose gradients are dropped, with its sums that were sent already."""
    plain(model, optimizer, 2 * x, ranks)
    optimizer.zero_grad()
    plain(model, optimizer, x, ranks)


def odd_run(
    place: Place | None, kind: str, backward: Backward, checkpoints: str, **settings: Any
) -> Weights:
    model = wrapped(Odd(checkpoints), kind)
    settings = {"stagger": False, **settings}
    optimizer = GoMuon(model, lr=0.02, refresh_every=2, loss_reduction="sum", **settings)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        share = slice(0, 20) if place is None else place.share((8, 12))
        backward(model, optimizer, x[share], 1 if place is None else place.size)
        optimizer.step()
    return weights(model)


CASES: dict[str, tuple[str, Backward, str, dict[str, Any]]] = {
    "plain": ("ddp", plain, "", {}),
    "fsdp": ("fsdp", plain, "", {}),
    "orders": ("ddp", mirrored, "", {}),
    "micro-batches": ("fsdp", micro_batches, "", {}),
    "no_sync": ("ddp", unsynchronised, "", {}),
    "fsdp, two": ("fsdp", unsynchronised, "", {}),
    "repeated": ("fsdp", repeated, "", {}),
    "masked": ("ddp", masked, "", {}),
    "dropped": ("ddp", dropped, "", {}),
    "checkpoints": ("ddp", plain, "plain", {}),
    "reentrant": ("ddp", plain, "reentrant", {}),
    "inputs only": ("ddp", plain, "", {"alpha": (0, 0.25)}),
    "blocks": ("fsdp", plain, "", {"block_size": 4}),
    "staggered": ("ddp", plain, "", {"stagger": True}),
    "staggered, fsdp": ("fsdp", plain, "", {"stagger": True}),
    "staggered, no_sync": ("ddp", unsynchronised, "", {"stagger": True}),
}


def odd_runs(place: Place, names: list[str]) -> dict[str, tuple[Weights, int]]:
    found = {}
    for name in names:
        kind, backward, checkpoints, settings = CASES[name]
        with eager() as inside:
            trained = odd_run(place, kind, backward, checkpoints, **settings)
        found[name] = trained, inside[0]
    return found


@pytest.mark.parametrize("part", [0, 1, 2])
def test_sums_that_leave_early_are_exact(part: int, tmp_path: Path) -> None:
    """Ranks equal one process with the union, in every case in which sums are hard to complete."""
    names = list(CASES)[part::3]
    answers = launch(2, odd_runs, tmp_path, names=names)
    for name in names:
        _, backward, checkpoints, settings = CASES[name]
        ranks = [answer[name][0] for answer in answers]
        assert_alike(ranks)
        alone = odd_run(None, "alone", backward, checkpoints, **settings)
        assert distance(ranks[0], alone) < 1e-9, name
        # Six units in each of six refreshes, except what waits for the step.
        assert all(answer[name][1] >= 30 for answer in answers), name


def expert_runs(place: Place) -> dict[str, tuple[Weights, int]]:
    """A layer that only one rank uses, or none."""
    found = {}
    for kind in ("ddp", "fsdp"):
        with eager() as inside:
            found[kind] = experts(place, kind, "GoMuon", skips=kind == "ddp"), inside[0]
    return found


def test_a_layer_that_one_rank_does_not_use_does_not_stop_the_others(tmp_path: Path) -> None:
    answers = launch(2, expert_runs, tmp_path)
    for kind in ("ddp", "fsdp"):
        ranks = [answer[kind][0] for answer in answers]
        assert_alike(ranks)
        alone = experts(None, "alone", "GoMuon", skips=kind == "ddp")
        assert distance(ranks[0], alone) < 1e-9, kind
        assert all(answer[kind][1] >= 8 for answer in answers), kind


def test_an_input_that_is_not_shared_any_more_is_sent_at_the_step(tmp_path: Path) -> None:
    answers = launch(2, changing_run, tmp_path)
    assert_alike([trained for trained, _ in answers])
    assert distance(answers[0][0], changing_run(None)[0]) < 1e-9
    assert all(residues == [False, True, True] for _, residues in answers)


class Changing(nn.Module):
    """q and k share their input, until they do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.ModuleDict({"q": nn.Linear(5, 6), "k": nn.Linear(5, 6)})
        self.last, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, apart: bool) -> Tensor:
        q, k = self.attention["q"](x), self.attention["k"](2 * x if apart else x)
        return self.head(torch.tanh(self.last(torch.tanh(q) * k)))


def changing_run(place: Place | None) -> tuple[Weights, list[bool]]:
    model = wrapped(Changing(), "alone" if place is None else "ddp")
    optimizer = GoMuon(model, refresh_every=1, loss_reduction="sum")
    residues = []
    ranks = 1 if place is None else place.size
    with eager():
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
            x = x if place is None else x[place.share((8, 12))]
            optimizer.zero_grad()
            for part in x.chunk(2):
                (ranks * model(part, step > 0).square().sum()).backward()
            optimizer.step()
            residues.append(place is not None and stream_of(optimizer).residue)
    return weights(model), residues


# ---- faults --------------------------------------------------------------------------------------


def failing(place: Place, kind: str) -> tuple[str, str, bool, float, Weights]:
    """Rank 1 cannot send its sums in the second backward pass."""
    model = wrapped(Odd(), kind)
    optimizer = GoMuon(model, refresh_every=1)

    def backward(step: int) -> None:
        generator = torch.Generator().manual_seed(step * place.size + place.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=generator, dtype=torch.float64)).square().sum().backward()

    def fail(*_: Any) -> Tensor:
        raise MemoryError("there is none left")

    with eager():
        backward(0)
        optimizer.step()
        before = weights(model)
        real = stream.packed
        if place.rank == 1:
            stream.packed = fail  # type: ignore[assignment]
        backward(1)
        stream.packed = real
        begin = time.monotonic()
        error, words = "", ""
        try:
            optimizer.step()
        except Exception as failure:
            error, words = type(failure).__name__, str(failure)
        took = time.monotonic() - begin
        unchanged = distance(weights(model), before) == 0
        for step in (2, 3):
            backward(step)
            optimizer.step()
    return error, words, unchanged, took, weights(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_cannot_send_is_told_to_all_at_the_step(kind: str, tmp_path: Path) -> None:
    answers = launch(2, failing, tmp_path, kind=kind)
    for rank, (error, words, unchanged, took, _) in enumerate(answers):
        assert error == ("MemoryError" if rank else "RankError")
        assert "there is none left" in words
        assert unchanged
        assert took < 20
    assert_alike([trained for *_, trained in answers])


def unequal(place: Place) -> tuple[list[int], Weights]:
    """The ranks know of different shared inputs, so nothing is sent in the backward pass."""
    model = wrapped(Odd(), "ddp")
    optimizer = GoMuon(model, refresh_every=1)
    sent = []
    with eager() as inside:
        for step in range(3):
            generator = torch.Generator().manual_seed(step * place.size + place.rank)
            x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            loss = model(x).square().sum()
            if place.rank == 1 and step == 1:
                optimizer._capture.groups[0].shared.leaders.clear()
            loss.backward()
            optimizer.step()
            sent.append(inside[0])
    return sent, weights(model)


def test_ranks_with_different_layouts_send_at_the_step(tmp_path: Path) -> None:
    answers = launch(2, unequal, tmp_path)
    for sent, _ in answers:
        assert sent[0] > 0
        assert sent[1] == sent[0]
        assert sent[2] > sent[1]
    assert_alike([trained for _, trained in answers])
