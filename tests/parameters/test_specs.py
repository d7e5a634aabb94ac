"""Heads, fused projections, blocks and transposed weights: each block is a matrix of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, LayerSpec, MatchedKFAC, Muon, Shampoo
from gomuon.functional import polar
from gomuon.parameters.layers import Layer
from gomuon.parameters.specs import check_spec
from tests.models import language_loss, transformer

SPECS = [
    LayerSpec(),
    LayerSpec(parts=3),
    LayerSpec(input_heads=2),
    LayerSpec(parts=3, input_heads=2),
    LayerSpec(block=4),
    LayerSpec(transposed=True),
    LayerSpec(heads=2, input_heads=3, transposed=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_cutting_and_joining_are_inverse(spec: LayerSpec) -> None:
    W = torch.randn(6, 8).double()
    layer = Layer("w", W.clone(), {}, spec)
    matrices = layer.weights
    assert matrices.shape == (layer.blocks, *layer.shape)
    layer.assign(2 * matrices)
    torch.testing.assert_close(layer.parameter, 2 * W)
    layer.set_memory("momentum", matrices.clone())
    torch.testing.assert_close(layer.memory_or_zeros("momentum"), matrices)


def test_blocks_are_the_expected_pieces() -> None:
    W = torch.arange(24.0).reshape(4, 6)
    halves = Layer("w", W, {}, LayerSpec(heads=2, input_heads=3)).weights
    torch.testing.assert_close(halves[0], W[:2, :2])
    torch.testing.assert_close(halves[1], W[:2, 2:4])
    torch.testing.assert_close(halves[5], W[2:, 4:])
    padded = Layer("w", W, {}, LayerSpec(block=4)).weights
    assert padded.shape == (2, 4, 4)
    torch.testing.assert_close(padded[1][:, :2], W[:, 4:])
    assert not padded[1][:, 2:].any()


def test_a_joined_bias_is_the_last_column() -> None:
    W, b = torch.randn(3, 4), torch.randn(3)
    bias = b.clone()
    layer = Layer("w", W.clone(), {}, LayerSpec(bias=bias))
    torch.testing.assert_close(layer.weights[0], torch.cat([W, b[:, None]], 1))
    layer.assign(layer.weights + 1)
    torch.testing.assert_close(bias, b)  # frozen: it has no gradient
    bias.grad = torch.zeros(3)
    layer.assign(layer.weights + 1)
    torch.testing.assert_close(layer.parameter, W + 2)
    torch.testing.assert_close(bias, b + 1)


def test_blocks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has 6 rows, which 5 blocks do not divide"):
        check_spec("w", torch.zeros(6, 8), LayerSpec(heads=5))
    with pytest.raises(ValueError, match="16 columns, which 3 blocks do not divide"):
        GoMuon(transformer(), specs={"*.q.weight": LayerSpec(input_heads=3)})
    with pytest.raises(ValueError, match="matches no parameter"):
        GoMuon(transformer(), specs={"*.query.weight": LayerSpec(heads=2)})


def test_head_by_head_muon() -> None:
    model = transformer(layers=1)
    optimizer = Muon(
        model,
        lr=0.1,
        momentum=0.0,
        specs={"*.[qkv].weight": LayerSpec(heads=2), "*.o.weight": LayerSpec(input_heads=2)},
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    language_loss(model, 0).backward()
    optimizer.step()

    def moved(name: str) -> tuple[Tensor, Tensor]:
        p = model.get_parameter(f"trunk.blocks.0.attention.{name}.weight")
        assert p.grad is not None
        return before[f"trunk.blocks.0.attention.{name}.weight"] - p.detach(), p.grad

    for name in "qkv":
        step, G = moved(name)
        expected = torch.cat([polar(half) for half in G.chunk(2, 0)], 0)
        torch.testing.assert_close(step, 0.1 * expected)
    step, G = moved("o")
    expected = torch.cat([2**0.5 * polar(half) for half in G.chunk(2, 1)], 1)
    torch.testing.assert_close(step, 0.1 * expected)


class Fused(nn.Module):
    """q, k and v in one linear layer, or in three with the same weights."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(6, 15, bias=False)
        self.fused = fused
        if fused:
            self.qkv = whole
        else:
            self.parts = nn.ModuleList(nn.Linear(6, 5, bias=False) for _ in range(3))
            for part, rows in zip(self.parts, whole.weight.detach().chunk(3), strict=True):
                part.get_parameter("weight").data = rows.clone()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q, k, v = (part(x) for part in self.parts)
        return (q * k).tanh() * v


def test_a_fused_projection_equals_three_layers() -> None:
    fused, apart = Fused(True), Fused(False)
    optimizer = GoMuon(
        fused, routes={"qkv.weight": "matrix"}, specs={"qkv.weight": LayerSpec(parts=3)}
    )
    other = GoMuon(apart, routes={"parts.*": "matrix"})
    for step in range(9):
        x = torch.randn(20, 6, generator=torch.Generator().manual_seed(step)).double()
        for model, o in ((fused, optimizer), (apart, other)):
            o.zero_grad()
            model(x).square().mean().backward()
            o.step()
    joined = torch.cat([part.get_parameter("weight") for part in apart.parts])
    torch.testing.assert_close(fused.qkv.weight, joined, rtol=1e-9, atol=1e-11)


class Conv1D(nn.Module):
    """As Transformers' layer of that name: the weight is stored inputs × outputs."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_spec_keeps_how_the_module_stores_its_weight() -> None:
    model = nn.Sequential(Conv1D(12, 5), nn.Tanh(), nn.Linear(12, 2))
    optimizer = GoMuon(model, specs={"0.weight": LayerSpec(parts=3, heads=2)})
    layer = Layer("", model[0].weight, {}, optimizer._layout.specs[model[0].weight])  # type: ignore[arg-type,index]
    assert layer.weights.shape == (6, 2, 5)


def test_a_transposed_layer_equals_a_linear_one() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    turned = nn.Sequential(
        Conv1D(7, 5), nn.Tanh(), Conv1D(4, 7), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    for index in (0, 2, 4):
        weight = plain[index].get_parameter("weight").detach()
        bias = plain[index].get_parameter("bias").detach()
        turned[index].weight.data = (weight if index == 4 else weight.T).clone()
        turned[index].bias.data = bias.clone()
    optimizer, other = GoMuon(plain), GoMuon(turned)
    assert {r.name for r in other.routing_table().treated("matrix")} == {"0.weight", "2.weight"}
    for step in range(9):
        x = torch.randn(20, 5, generator=torch.Generator().manual_seed(step)).double()
        for model, o in ((plain, optimizer), (turned, other)):
            o.zero_grad()
            model(x).square().mean().backward()
            o.step()
    for index in (0, 2):
        torch.testing.assert_close(turned[index].weight.T, plain[index].weight)


def test_what_cannot_be_cut_is_refused_at_construction() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, groups=2)
            self.linear = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(ValueError, match=r"'conv.weight' is a convolution with 2 groups.*4 × 1"):
        GoMuon(Odd(), specs={"conv.weight": LayerSpec(heads=4)})
    with pytest.raises(
        ValueError, match=r"inputs='diagonal' in the LayerSpec of 'linear.weight' is for methods"
    ):
        Muon(Odd(), specs={"linear.weight": LayerSpec(inputs="diagonal")})
    wrong: Any
    for wrong in (0, -1, 2.5, True, "blocks", [4]):
        with pytest.raises(
            ValueError, match=r"outputs in the LayerSpec of 'linear.weight' must be None, a whole"
        ):
            GoMuon(Odd(), specs={"linear.weight": LayerSpec(outputs=wrong)})
        with pytest.raises(ValueError, match=r"block in the LayerSpec of 'linear.weight' must be"):
            Shampoo(Odd(), specs={"linear.weight": LayerSpec(block=wrong)})
    with pytest.raises(ValueError, match=r"'scale' is a scalar"):
        GoMuon(Odd(), specs={"scale": LayerSpec()})
    Muon(Odd(), specs={"linear.weight": LayerSpec(block=4)})


def test_a_block_size_cuts_transposed_weights_too() -> None:
    """Transformers' Conv1D is a linear layer stored the other way round: the same blocks."""
    linear, stored = nn.Linear(8, 12).double(), Conv1D(12, 8).double()
    with torch.no_grad():
        stored.weight.copy_(linear.weight.mT)
        stored.bias.copy_(linear.bias)
    one, other = (
        Shampoo(layer, block_size=4, routes={"weight": "matrix"}) for layer in (linear, stored)
    )
    for seed in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).double()
        for layer, optimizer in ((linear, one), (stored, other)):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
    assert other.state[stored.weight]["left_factor"].shape == (6, 4, 4)
    torch.testing.assert_close(stored.weight, linear.weight.mT, rtol=1e-6, atol=1e-8)


def test_matched_kfacs_balance_is_each_blocks_own() -> None:
    """Cut on both sides, every block is as a layer of its own with that B and that A."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 8, bias=False).double()
    spec = LayerSpec(heads=2, input_heads=3)
    optimizer = MatchedKFAC(layer, specs={"weight": spec}, routes={"weight": "matrix"})
    layer(torch.randn(9, 6).double()).square().sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["left_map"].shape == (6, 4, 4)
    assert state["right_map"].shape == (6, 2, 2)
    root = optimizer.param_groups[0]["damping"] ** 0.5
    for block in range(6):
        A, B = state["right_factor"][block % 3], state["left_factor"][block // 3]
        pi = ((A.trace() / 2) / (B.trace() / 4)).sqrt()
        for name, factor in (("right_map", A), ("left_map", B)):
            ridge = root * (pi if name == "right_map" else 1 / pi)
            inverse = torch.linalg.inv(factor + ridge * torch.eye(len(factor)).double())
            torch.testing.assert_close(state[name][block] @ state[name][block], inverse)
