"""Row counts: on the CPU where shapes give them, and never float64 on another device.

The meta device takes the part of an accelerator: no number can be read from it, so that whatever
tries to fails.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gomuon import GoMuon
from gomuon.capture.tap import Probe, Tap
from gomuon.moments import Moment, stacked_counts
from gomuon.parameters.rows import LinearRows, Rows, SumCut, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm

ELSEWHERE = torch.device("meta")
READ_BACKS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal}


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # meta has none


class Operations(TorchDispatchMode):
    """Records float64 operations on other devices than the CPU, and what is read or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.wide: list[Any] = []
        self.read: list[Any] = []
        self.copied: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.dtype == torch.float64 and t.device == ELSEWHERE for t in [*given, *made]):
            self.wide.append(func)
        if func.overloadpacket in READ_BACKS:
            self.read.append(func)
        if {t.device for t in given} == {ELSEWHERE} and any(t.device != ELSEWHERE for t in made):
            self.copied.append(func)
        return result


def run(reader: Rows, x: Tensor, y: Tensor, *, masked: bool, passes: int) -> tuple[Any, ...]:
    """The moments of inputs and gradients after some backward passes, and what they took."""
    widths = reader.inputs(x).shape[-1], reader.gradients(y).shape[-1]
    cuts = tuple(
        SumCut(1, SideForm(d), where) for d, where in zip(widths, (RIGHT, LEFT), strict=True)
    )
    inputs, gradients = (Probe(cut.shape, torch.float32, y.device) for cut in cuts)
    mask = torch.ones(reader.positions(y), device=y.device) if masked else None
    leaves = [
        leaf
        for probe in (inputs, gradients)
        for leaf in (
            (probe.total, None, probe.counted) if masked else (probe.total, probe.known, None)
        )
    ]
    with Operations() as seen:
        for _ in range(passes):
            Tap.apply(y, x, mask, reader, cuts, None, None, *leaves).sum().backward()
        found = inputs.moment, gradients.moment
    return *found, seen


CASES: list[Any] = [
    (nn.Linear(5, 3), (4, 6, 5), 24),
    (nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 6), 120),
]


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("module", "shape", "uses"), CASES, ids=["linear", "convolution"])
def test_numbers_that_shapes_give_are_read_without_waiting(
    module: nn.Module, shape: tuple[int, ...], uses: int, passes: int, rows: int | None
) -> None:
    module = module.to(ELSEWHERE)
    x = torch.empty(shape, device=ELSEWHERE)
    y = module(x).detach().requires_grad_()
    reader = rows_for(module, Sampling(rows=rows))
    assert reader is not None
    inputs, gradients, seen = run(reader, x, y, masked=False, passes=passes)
    for moment in (inputs, gradients):
        assert moment.total.device == ELSEWHERE
        assert moment.count.item() == passes * (rows or uses)
        assert moment.uses.item() == passes * uses
    assert not seen.wide
    assert not seen.read
    assert not seen.copied


@pytest.mark.parametrize("rows", [None, 7])
def test_numbers_of_masked_rows_stay_on_the_device_in_float32(rows: int | None) -> None:
    x = torch.empty(4, 6, 5, device=ELSEWHERE)
    y = torch.empty(4, 6, 3, device=ELSEWHERE, requires_grad=True)
    *moments, seen = run(LinearRows(Sampling(rows=rows)), x, y, masked=True, passes=2)
    for moment in moments:
        for number in (moment.count, moment.uses):
            assert (number.dtype, number.device) == (torch.float32, ELSEWHERE)
    assert not seen.wide
    assert not seen.read
    assert not seen.copied


def test_known_and_counted_numbers_add_up() -> None:
    probe = Probe((2, 2), torch.float32, torch.device("cpu"))
    probe.total.grad = torch.eye(2)
    probe.known.grad = torch.tensor([3.0, 5.0], dtype=torch.float64)
    probe.counted.grad = torch.tensor([2.0, 4.0], dtype=torch.float64)
    moment = probe.moment
    assert moment is not None
    assert (float(moment.count), float(moment.uses)) == (5, 9)
    probe.clear()
    assert all(leaf.grad is None for leaf in probe.leaves)


def test_counts_go_to_the_device_that_has_some_of_them() -> None:
    here, there = torch.tensor(3.0, dtype=torch.float64), torch.empty((), device=ELSEWHERE)
    assert stacked_counts([here, here]).tolist() == [3, 3]
    for moved in (stacked_counts([here, there]), stacked_counts([here, here], ELSEWHERE)):
        assert (moved.shape, moved.dtype, moved.device) == ((2,), torch.float32, ELSEWHERE)


def test_a_step_reads_no_count_of_a_shared_input() -> None:
    """q and k read one tensor. What remains to be read are flags of the factors."""
    model = nn.ModuleDict({name: nn.Linear(3, 4) for name in "qk"})
    optimizer = GoMuon(model, routes={"*.weight": "matrix"})
    x = torch.randn(6, 3)
    sum(layer(x).square().sum() for layer in model.values()).backward()
    with Operations() as seen:
        statistics = optimizer._capture.collect(ranks=1)[0]
    assert not seen.read
    found: list[Moment | None] = [s.inputs for s in statistics.values()]
    assert found[0] is not None
    assert found[0] is found[1]
    assert found[0].count.item() == 6
