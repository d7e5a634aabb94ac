"""How long sides are cut, what the routing table says of it, and how it goes with other cuts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gomuon
from gomuon import KFAC, GoMuon, LayerSpec, Muon
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.side_forms import SideForm, choice_of, form_of, number_of_blocks
from gomuon.recipes.registry import METHODS
from tests.functional.matrices import repeatable
from tests.methods import references
from tests.methods.references.cut_sides import CutSide
from tests.methods.references.data import ROWS, relative_error
from tests.models import train, transformer
from tests.parameters.test_specs import Conv1D

CAPTURING = [name for name, kind in METHODS.items() if kind.recipe.geometry.uses_moments]


# ---- how many pieces -----------------------------------------------------------------------------


@repeatable
@given(st.integers(1, 5000), st.integers(1, 600))
def test_pieces_are_short_enough_and_as_few_as_allowed(side: int, block_size: int) -> None:
    form = form_of(side, block_size)
    fewest = -(-side // block_size)
    assert fewest <= form.blocks <= 2 * fewest
    assert form.size <= block_size
    assert 1 <= form.last <= form.size
    assert (form.blocks - 1) * form.size + form.last == side
    if form.last < form.size:  # only if no number up to twice as many divides the side
        assert form.blocks == fewest
        assert all(side % blocks for blocks in range(fewest, 2 * fewest + 1))


def test_cuts_of_usual_sides() -> None:
    found = {side: number_of_blocks(side, 1024) for side in (64, 1024, 1600, 2304, 3072, 4608)}
    assert found == {64: 1, 1024: 1, 1600: 2, 2304: 3, 3072: 3, 4608: 6}
    assert number_of_blocks(11008, 1024) == 16  # Llama's MLP: 11 do not divide it
    assert str(form_of(1025, 1024)) == "1025 as 513 + 512"
    assert str(form_of(50257, 1024)) == "50257 as 49×1006 + 963"


def test_a_spec_goes_before_max_side_and_max_side_before_block_size() -> None:
    group = {"block_size": 4, "max_side": 10, "long_sides": "diagonal"}
    assert choice_of(11, None, group) == "diagonal"
    assert choice_of(10, None, group) == 4
    assert choice_of(11, "whole", group) == "whole"
    assert choice_of(11, None, {"block_size": None, "max_side": None}) == "whole"
    assert form_of(11, None) == SideForm(11)


# ---- the routing table ---------------------------------------------------------------------------


def test_the_routing_table_says_what_every_matrix_got() -> None:
    model = nn.Sequential(
        nn.Linear(2048, 512),
        nn.Linear(512, 1025),
        nn.Linear(1025, 5000),
        nn.Linear(5000, 12),
        nn.Linear(12, 3),
        nn.MultiheadAttention(3, 1),
        nn.Linear(3, 3),
    )
    specs = {"1.weight": LayerSpec(inputs="diagonal"), "3.weight": LayerSpec(heads=3, outputs=2)}
    table = GoMuon(model, block_size=1024, max_side=4096, specs=specs).routing_table()
    found = {row.name: row.geometry for row in table if row.treatment == "matrix"}
    assert found == {
        "0.weight": "512 × 2048 as 2×1024",
        "1.weight": "1025 as 513 + 512 × 512 as a diagonal",
        "2.weight": "identity (side 5000 > max_side) × 1025 as 513 + 512",
        "3.weight": "3 of 4 as 2×2 × identity (side 5000 > max_side)",
        "4.weight": "3 × 12",
        "5.in_proj_weight": "9 × 3",
        "5.out_proj.weight": "3 × 3",
    }
    assert all(row.geometry == "" for row in table.treated("adamw"))
    header, first = str(table).splitlines()[:2]
    assert header.split() == ["parameter", "shape", "treatment", "geometry", "reason"]
    assert "512 × 2048 as 2×1024" in first
    assert "geometry" not in str(Muon(model).routing_table())
    assert GoMuon(model).routing_table()[0].geometry == "512 as 2×256 × 2048 as 8×256"
    right = gomuon.NewtonMuon(model).routing_table()[0].geometry
    assert right == "identity × 2048 as 2×1024"
    joined = KFAC(model).routing_table()
    assert [row.geometry for row in joined[:2]] == ["512 × 2049 as 3×683", ""]


# ---- with heads, fused projections, groups and transposed weights --------------------------------


class Joined(nn.Module):
    """Two layers of 8 × 6 as one with 16 outputs (fused) or 12 inputs, or apart."""

    def __init__(self, kind: str, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.apart = kind, apart
        outputs, inputs = (16, 6) if kind == "outputs" else (8, 12)
        whole = nn.Linear(inputs, outputs, bias=False)
        if apart:
            pieces = whole.weight.detach().chunk(2, 0 if kind == "outputs" else 1)
            self.layers = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in pieces)
            for linear, piece in zip(self.layers, pieces, strict=True):
                linear.get_parameter("weight").data = piece.clone()
        else:
            self.layers = nn.ModuleList([whole])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not self.apart:
            return self.layers[0](x)
        if self.kind == "outputs":
            return torch.cat([layer(x) for layer in self.layers], -1)
        first, second = x.chunk(2, -1)
        return self.layers[0](first) + self.layers[1](second)

    @property
    def weight(self) -> Tensor:
        weights = [layer.get_parameter("weight").detach() for layer in self.layers]
        return torch.cat(weights, 0 if self.kind == "outputs" else 1)


LONG: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": 3},
    "padded": {"block_size": 5},  # 8 as 2×4, 6 as 2×3
    "diagonal": {"max_side": 7, "long_sides": "diagonal"},
    "identity": {"max_side": 7},
}


@pytest.mark.parametrize("method", CAPTURING)
@pytest.mark.parametrize("kind", ["outputs", "inputs"])
@pytest.mark.parametrize("long", LONG)
def test_cut_sides_of_heads_are_those_of_separate_layers(method: str, kind: str, long: str) -> None:
    """K-FAC's clip is switched off: it couples layers, and layers that are apart are two."""
    spec = LayerSpec(heads=2) if kind == "outputs" else LayerSpec(input_heads=2)
    settings = {**LONG[long], **({"kl_clip": None} if method == "KFAC" else {})}
    models = Joined(kind, False), Joined(kind, True)
    optimizers = (
        METHODS[method](models[0], routes={"*": "matrix"}, specs={"*": spec}, **settings),
        METHODS[method](models[1], routes={"*": "matrix"}, **settings),
    )
    for _ in range(6):
        x = torch.randn(20, 6 if kind == "outputs" else 12).double()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sin().square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", CAPTURING)
@pytest.mark.parametrize("long", LONG)
def test_groups_of_a_convolution_are_cut_as_separate_convolutions(method: str, long: str) -> None:
    torch.manual_seed(0)
    whole = nn.Conv2d(4, 10, 2, groups=2, bias=False).double()  # two of 5 × 8
    apart = nn.ModuleList(nn.Conv2d(2, 5, 2, bias=False).double() for _ in range(2))
    for conv, piece in zip(apart, whole.weight.detach().chunk(2), strict=True):
        conv.get_parameter("weight").data = piece.clone()
    settings = {**LONG[long], **({"kl_clip": None} if method == "KFAC" else {})}
    routes: Any = {"*": "matrix"}
    optimizers = [METHODS[method](model, routes=routes, **settings) for model in (whole, apart)]
    for _ in range(6):
        x = torch.randn(3, 4, 4, 4).double()
        for optimizer, output in (
            (optimizers[0], whole(x)),
            (
                optimizers[1],
                torch.cat([c(p) for c, p in zip(apart, x.chunk(2, 1), strict=True)], 1),
            ),
        ):
            optimizer.zero_grad()
            output.sin().square().mean().backward()
            optimizer.step()
    joined = torch.cat([conv.get_parameter("weight") for conv in apart])
    torch.testing.assert_close(whole.weight, joined, rtol=1e-8, atol=1e-10)
    factor = optimizers[0].state[whole.weight].get("right_factor")
    if long == "blocks" and factor is not None:
        assert factor.shape == (2, 4, 2, 2)


def test_a_transposed_layer_is_cut_as_a_linear_one() -> None:
    torch.manual_seed(0)
    plain, turned = nn.Linear(11, 8).double(), Conv1D(8, 11).double()
    turned.weight.data, turned.bias.data = (
        plain.weight.detach().T.clone(),
        plain.bias.detach().clone(),
    )
    spec = {"weight": LayerSpec(outputs=4, inputs=6)}
    both = [GoMuon(m, routes={"weight": "matrix"}, specs=spec) for m in (plain, turned)]
    for _ in range(6):
        x = torch.randn(20, 11).double()
        for model, optimizer in zip((plain, turned), both, strict=True):
            optimizer.zero_grad()
            model(x).sin().square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(turned.weight.T, plain.weight)
    assert both[1].state[turned.weight]["right_map"].shape == (1, 2, 6, 6)
    assert both[1].state[turned.weight]["left_map"].shape == (1, 2, 4, 4)


def test_a_joined_bias_is_the_last_column_of_the_last_block() -> None:
    """K-FAC's side of 10 inputs and a one is cut as 4 + 4 + 3."""
    torch.manual_seed(0)
    module = nn.Linear(10, 6).double()
    optimizer = KFAC(module, block_size=4, loss_reduction="sum", routes={"*": "matrix"})
    joined = torch.cat([module.weight.detach(), module.bias.detach().unsqueeze(1)], 1)
    reference = references.KFAC(joined)
    reference.left, reference.right = CutSide((3, 3)), CutSide((4, 4, 3))
    for _ in range(6):
        x, g = torch.randn(ROWS, 10).double(), torch.randn(ROWS, 6).double()
        optimizer.zero_grad()
        (module(x) * g).sum().backward()
        optimizer.step()
        ones = torch.cat([x, torch.ones(ROWS, 1).double()], 1)
        reference.step(g.T @ ones, ones, g)
    assert relative_error(module.weight, reference.W[:, :-1]) < 1e-8
    assert relative_error(module.bias, reference.W[:, -1]) < 1e-8


# ---- shared inputs, refreshes that take turns, and changes on the way ----------------------------


def right_factors(optimizer: MatrixOptimizer, model: nn.Module) -> list[Tensor]:
    names = [f"trunk.blocks.0.attention.{name}.weight" for name in "qkv"]
    return [optimizer.state[model.get_parameter(name)]["right_factor"] for name in names]


def test_layers_share_a_cut_factor_if_they_cut_the_input_alike() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, block_size=7, input_decay=0.9)
    train(model, optimizer, range(2))
    q, k, v = right_factors(optimizer, model)
    assert q is k is v
    assert q.shape == (1, 4, 4, 4)
    model = transformer(layers=1)
    specs = {"*.k.weight": LayerSpec(inputs=4), "*.v.weight": LayerSpec(inputs="whole")}
    optimizer = GoMuon(model, block_size=8, input_decay=0.9, specs=specs)
    train(model, optimizer, range(2))
    shapes = [tuple(S.shape) for S in right_factors(optimizer, model)]
    assert shapes == [(1, 2, 8, 8), (1, 4, 4, 4), (1, 16, 16)]


def test_an_input_that_is_cut_in_two_ways_is_captured_right() -> None:
    """The blocks of k and v are those of the factor that q keeps whole."""
    model, twin = transformer(layers=1), transformer(layers=1)
    specs = {"*.k.weight": LayerSpec(inputs=4), "*.v.weight": LayerSpec(inputs="diagonal")}
    mixed = GoMuon(model, input_decay=0.9, shrinkage=0.0, specs=specs)
    plain = GoMuon(twin, input_decay=0.9, shrinkage=0.0)
    train(model, mixed, range(1))
    train(twin, plain, range(1))
    (q, k, v), (whole, *_) = right_factors(mixed, model), right_factors(plain, twin)
    torch.testing.assert_close(q, whole)
    for number in range(4):
        piece = slice(4 * number, 4 * number + 4)
        torch.testing.assert_close(k[0, number], whole[0, piece, piece])
    torch.testing.assert_close(v[0, 0], whole[0].diagonal())


def test_staggered_layers_take_turns_with_cut_sides() -> None:
    model = transformer(layers=2)
    optimizer = GoMuon(model, stagger=True, block_size=7, max_side=20)
    train(model, optimizer, range(5))
    for row in optimizer.routing_table().treated("matrix"):
        assert "left_seen" in optimizer.state[row.parameter] or row.parameter.shape[0] == 24
    assert len({int(4 * phase) for phase in optimizer._layout.phases.values()}) == 4


@pytest.mark.parametrize("method", CAPTURING)
def test_a_block_size_may_change_between_steps(method: str) -> None:
    """State is cut again; the first refresh after it is that of the new blocks."""
    model = transformer(layers=1)
    optimizer = METHODS[method](model, refresh_every=2)
    shapes = []
    for size in (None, 7, 4, None):
        for group in optimizer.param_groups:
            group["block_size"] = size
        optimizer._gate()
        train(model, optimizer, range(3))
        state = optimizer.state[model.get_parameter("trunk.blocks.0.mlp.up.weight")]
        shapes.append([tuple(state[key].shape) for key in sorted(state) if "right_" in key
                       and key.endswith(("map", "basis"))])  # fmt: skip
        assert all(p.isfinite().all() for p in model.parameters())
    assert shapes == [[(1, 16, 16)], [(1, 4, 4, 4)], [(1, 4, 4, 4)], [(1, 16, 16)]]


def test_a_long_convolution_refreshes_in_blocks() -> None:
    """The last layers of ResNet-18: 512 outputs as 2 × 256, and 4608 inputs as 18 × 256."""
    torch.manual_seed(0)
    conv = nn.Conv2d(512, 512, 3, padding=1, bias=False)
    optimizer = GoMuon(conv)
    before = conv.weight.detach().clone()
    conv(torch.randn(4, 512, 2, 2)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[conv.weight]
    shapes = {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
    assert shapes == {
        "momentum": (512, 512, 3, 3),
        "left_factor": (1, 2, 256, 256),
        "left_map": (1, 2, 256, 256),
        "right_map": (1, 18, 256, 256),
    }
    step = (before - conv.weight.detach()).flatten(1)
    assert step.isfinite().all()
    # The graft: ‖D‖_F = √rank; four images of two by two pixels have 16 rows.
    assert float(step.norm()) == pytest.approx(0.08 * 16**0.5, rel=0.05)
