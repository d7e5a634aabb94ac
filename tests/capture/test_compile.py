"""torch.compile: one graph for refresh steps or for each turn, one for reuse steps; as eager."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gomuon import Adaptive, GeometryWarning, GoMuon, LayerSpec
from gomuon.parameters.routing import Routes

CUT = LayerSpec(outputs=4, inputs="diagonal")  # 6 as 2×3


class Net(nn.Module):
    """q and k read one tensor; an in-place activation follows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.relu(self.q(x), inplace=True) * torch.sigmoid(self.k(x))
        return self.head(torch.tanh(self.hidden(mixed)))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def run(model: Callable[[Tensor], Tensor], net: Net, optimizer: GoMuon, steps: int = 12) -> None:
    for step in range(steps):
        x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in x.chunk(2):  # micro-batches, the second one shorter
            model(part).square().mean().backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "settings"),
    [
        ("compiled first", {}),
        ("optimizer first", {}),
        ("optimizer first", {"block_size": 3, "specs": {"hidden.weight": CUT}}),
        ("optimizer first", {"refresh_every": Adaptive(1e-9, most=4)}),
        ("compiled model given", {}),
    ],
)
def test_compiled_equals_eager(order: str, settings: dict[str, Any]) -> None:
    eager, net = Net(), Net()
    if order == "optimizer first":
        optimizer = GoMuon(net, polar="exact", **settings)
        compiled = torch.compile(net)
    else:
        compiled = torch.compile(net)
        given = compiled if order == "compiled model given" else net
        assert isinstance(given, nn.Module)
        optimizer = GoMuon(given, polar="exact")
    run(eager, eager, GoMuon(eager, polar="exact", **settings))
    run(compiled, net, optimizer)
    assert not counters["graph_break"]
    for (name, p), q in zip(eager.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=name)
    names = [row.name for row in optimizer.routing_table()]
    assert names == [name for name, _ in net.named_parameters()], "without the compiler's prefix"


@pytest.mark.slow
def test_two_graphs_and_no_recompilation_after_the_first_cycle() -> None:
    net = Net()
    optimizer = GoMuon(net, polar="exact")
    compiled = torch.compile(net, dynamic=False)

    def steps(numbers: range) -> None:
        for step in numbers:
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()

    steps(range(4))
    assert counters["stats"]["unique_graphs"] == 2
    steps(range(4, 16))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "graphs"),
    [(2, 2), (4, 4), (6, 4)],  # there are three units, and turns of no unit share a graph
)
def test_a_graph_for_each_turn(every: int, graphs: int) -> None:
    """What is compiled does not depend on the backend, so it is one that needs no compiler."""
    eager, net = Net(), Net()
    settings: dict[str, Any] = {"polar": "exact", "stagger": True, "refresh_every": every}
    optimizer, other = GoMuon(net, **settings), GoMuon(eager, **settings)
    compiled = torch.compile(net, dynamic=False, backend="aot_eager")
    for step in range(3 * every):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        for model, one in ((compiled, optimizer), (eager, other)):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
        if step >= every - 1:
            assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    for (name, p), q in zip(eager.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_compiled_step_is_the_eager_one() -> None:
    """`step` opts out of compilation, so that compiling it changes nothing."""
    eager, net = Net(), Net()
    run(eager, eager, GoMuon(eager, polar="exact"), steps=6)
    optimizer = GoMuon(net, polar="exact")
    compiled_step = torch.compile(lambda: optimizer.step())
    for step in range(6):
        x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in x.chunk(2):
            net(part).square().mean().backward()
        compiled_step()
    for p, q in zip(eager.parameters(), net.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.slow
def test_hooks_placed_after_a_compiled_run_are_reported_missing() -> None:
    net = Net()
    compiled = torch.compile(net)
    compiled(torch.randn(5, 3, 8)).sum().backward()
    optimizer = GoMuon(net, refresh_every=1)

    def step() -> None:
        optimizer.zero_grad()
        compiled(torch.randn(5, 3, 8)).square().mean().backward()
        optimizer.step()

    with pytest.warns(GeometryWarning, match="torch.compiler.reset"):
        step()
    torch.compiler.reset()
    step()
    assert "left_map" in optimizer.state[net.q.weight]


@pytest.mark.slow
def test_bounded_rows_are_the_same_ones_in_a_graph() -> None:
    eager, net = Net(), Net()
    optimizer = GoMuon(net, rows=4, polar="exact")
    run(eager, eager, GoMuon(eager, rows=4, polar="exact"))
    run(torch.compile(net), net, optimizer)
    assert not counters["graph_break"]
    for (name, p), q in zip(eager.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=name)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(3, 6, 3, padding=1), nn.Conv1d(6, 4, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        return hidden


@pytest.mark.slow
def test_lengths_that_change_need_no_graph_for_each() -> None:
    """Patches and counts of symbolic shapes. (Inductor would make a graph for each convolution.)"""
    net, eager = Convolutions(), Convolutions()
    routes: Routes = {"*.weight": "matrix"}
    optimizer, other = (
        GoMuon(m, rows=9, polar="exact", refresh_every=1, routes=routes) for m in (net, eager)
    )
    compiled = torch.compile(net, dynamic=True, backend="aot_eager")
    for length in (8, 11, 14, 17, 23, 30):
        x = torch.randn(4, 3, length)
        for model, one in ((compiled, optimizer), (eager, other)):
            one.zero_grad()
            model(x).square().mean().backward()
        for module, twin in ((net.first, eager.first), (net.second, eager.second)):
            ours = optimizer._capture.groups[0].collect()[module.weight]
            theirs = other._capture.groups[0].collect()[twin.weight]
            for a, b in ((ours.inputs, theirs.inputs), (ours.gradients, theirs.gradients)):
                assert a is not None
                assert b is not None
                assert (float(a.count), float(a.uses)) == (float(b.count), float(b.uses))
                torch.testing.assert_close(a.total, b.total, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
