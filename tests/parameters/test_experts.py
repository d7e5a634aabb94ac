"""A parameter with three dimensions is a stack of matrices, each treated by itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gomuon
from gomuon import GoMuon, LayerSpec, Muon
from gomuon.functional import polar
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.experts import expert_weights
from gomuon.parameters.layers import Layer
from gomuon.parameters.routing import route
from gomuon.parameters.specs import check_spec

METHODS = [
    kind
    for kind in map(gomuon.__dict__.get, gomuon.__all__)
    if isinstance(kind, type) and issubclass(kind, MatrixOptimizer) and hasattr(kind, "recipe")
    and kind.__name__ != "MuonQK"  # needs attention modules
]  # fmt: skip
SPECS = [
    LayerSpec(stack=True),
    LayerSpec(stack=True, transposed=True),
    LayerSpec(stack=True, parts=2, heads=2),
    LayerSpec(stack=True, input_heads=3),
    LayerSpec(stack=True, heads=3, input_heads=2, transposed=True),
    LayerSpec(stack=True, block=4),
    LayerSpec(stack=True, block=4, transposed=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(5, 12, 6), (2, 3, 12, 6)], ids=str)
def test_cutting_and_joining_are_inverse(spec: LayerSpec, shape: tuple[int, ...]) -> None:
    W = torch.randn(shape).double()
    layer = Layer("w", W.clone(), {}, spec)
    matrices = layer.weights
    assert matrices.shape == (layer.blocks, *layer.shape)
    layer.assign(2 * matrices)
    torch.testing.assert_close(layer.parameter, 2 * W)
    layer.set_memory("momentum", matrices.clone())
    torch.testing.assert_close(layer.memory_or_zeros("momentum"), matrices)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stack_is_cut_as_each_of_its_matrices(spec: LayerSpec) -> None:
    W = torch.randn(5, 12, 6).double()
    each = [Layer("w", one, {}, replace(spec, stack=None)) for one in W]
    whole = Layer("w", W, {}, spec)
    assert torch.equal(whole.weights, torch.cat([layer.weights for layer in each]))
    for side, index in (("left", 0), ("right", 1)):
        maps = [torch.randn(layer.tiling.strips[index], 2, 2) for layer in each]
        for layer, one in zip(each, maps, strict=True):
            layer.state[f"{side}_map"] = one
        whole.state[f"{side}_map"] = torch.cat(maps)
        made = [layer.map_per_block(f"{side}_map", side) for layer in each]
        expected = torch.cat([one for one in made if one is not None])
        found = whole.map_per_block(f"{side}_map", side)
        assert found is not None
        assert torch.equal(found, expected)


def test_what_is_no_stack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has the shape \(6, 8\), which is no stack"):
        check_spec("w", torch.zeros(6, 8), LayerSpec(stack=True))
    with pytest.raises(ValueError, match="'w' has 6 rows, which 4 blocks do not divide"):
        check_spec("w", torch.zeros(4, 6, 8), LayerSpec(stack=True, heads=4))


class Experts(nn.Module):
    """Four two-layer experts, mixed: in stacks, or in a weight for each expert and layer."""

    def __init__(self, *, stacked: bool, transposed: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(4, 8, 6, generator=generator).double() / 3
        down = torch.randn(4, 5, 8, generator=generator).double() / 3
        self.stacked, self.transposed = stacked, transposed
        if stacked:
            self.up = nn.Parameter(up.mT.contiguous() if transposed else up)
            self.down = nn.Parameter(down.mT.contiguous() if transposed else down)
        else:
            self.up = nn.ParameterList(up.unbind())  # type: ignore[assignment]
            self.down = nn.ParameterList(down.unbind())  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(())
        for e, part in enumerate(x.chunk(4)):
            up, down = self.up[e], self.down[e]
            if self.transposed:
                up, down = up.mT, down.mT
            y = y + F.linear(F.linear(part, up).tanh(), down).square().mean()
        return y


def trained(kind: type[MatrixOptimizer], model: Experts, spec: LayerSpec | None) -> list[Tensor]:
    optimizer = kind(
        model,
        routes={"*": "matrix"},
        specs=None if spec is None else {"*": spec},
    )
    for step in range(6):
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore::gomuon.GeometryWarning")
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_method_treats_a_stack_as_separate_matrices(kind: type[MatrixOptimizer]) -> None:
    apart = trained(kind, Experts(stacked=False), None)
    expected = torch.stack(apart[:4]), torch.stack(apart[4:])
    for found, other in zip(trained(kind, Experts(stacked=True), None), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-11)
    if kind.__name__ in ("SOAP", "SOAPMuon", "KLShampoo", "KLSOAP"):
        return  # the other layout rounds differently, which decides the basis of a null space
    turned = trained(
        kind, Experts(stacked=True, transposed=True), LayerSpec(stack=True, transposed=True)
    )
    # These two make rounding larger, by what they are (docs/compatibility.md).
    chaotic = kind.__name__ in ("Mousse", "MuonSquared")
    rtol, atol = (1e-4, 1e-5) if chaotic else (1e-8, 1e-10)
    for found, other in zip(turned, expected, strict=True):
        torch.testing.assert_close(found.mT, other, rtol=rtol, atol=atol)


def test_a_stack_with_parts_is_cut_in_both_ways() -> None:
    model = Experts(stacked=True)
    optimizer = Muon(
        model, lr=0.1, momentum=0.0, routes={"*": "matrix"}, specs={"up": LayerSpec(parts=2)}
    )
    before = model.up.detach().clone()
    model(torch.randn(40, 6).double()).backward()
    optimizer.step()
    G = model.up.grad
    assert G is not None
    expected = torch.stack([torch.cat([polar(half) for half in one.chunk(2)]) for one in G])
    torch.testing.assert_close(before - model.up.detach(), 0.1 * expected, rtol=1e-9, atol=1e-12)


class KnownExperts(nn.Module):
    """The attributes of Transformers' modules of experts."""

    def __init__(self, up: tuple[int, ...], down: tuple[int, ...], **attributes: object) -> None:
        super().__init__()
        self.num_experts = up[0]
        self.gate_up_proj = nn.Parameter(torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(up[:2]))
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("module", "transposed"),
    [
        (KnownExperts((4, 12, 8), (4, 8, 6), is_transposed=False), False),
        (KnownExperts((4, 8, 12), (4, 6, 8), is_transposed=True), True),
        (KnownExperts((4, 12, 8), (4, 8, 6), hidden_dim=8), False),
        (KnownExperts((4, 8, 12), (4, 6, 8), hidden_size=8), True),
        (KnownExperts((4, 8, 8), (4, 4, 8), hidden_size=8), True),  # the other weight tells
        (KnownExperts((4, 8, 8), (4, 8, 8), hidden_size=8), None),
        (KnownExperts((4, 12, 8), (4, 8, 6)), None),
    ],
)
def test_modules_of_experts_are_known_by_their_attributes(
    module: nn.Module, transposed: bool | None
) -> None:
    found = expert_weights(module)
    assert found == (
        {} if transposed is None else {"gate_up_proj": transposed, "down_proj": transposed}
    )
    model = nn.Sequential(nn.Linear(3, 3), module, nn.Linear(3, 3))
    table = {r.name: r for r in route(model)}
    entry = table["1.gate_up_proj"]
    assert table["1.gate_up_proj_bias"].treatment == "adamw"
    if transposed is None:
        assert entry.treatment == "adamw"
        assert "pass routes={'1.gate_up_proj': \"matrix\"}" in entry.reason
    else:
        assert (entry.treatment, entry.reason) == ("matrix", "4 experts")
    optimizer = GoMuon(model, routes={"1.*_proj": "matrix"})
    layer = Layer("", module.down_proj, {}, optimizer._layout.specs[module.down_proj])  # type: ignore[arg-type,index]
    _, m, n = module.get_parameter("down_proj").shape
    assert layer.weights.shape == ((4, n, m) if transposed else (4, m, n))


def test_kernels_of_torchs_own_layers_are_no_stacks() -> None:
    model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 3), nn.Bilinear(3, 4, 5))
    assert not any("stack" in entry.reason for entry in route(model))
    optimizer = Muon(model, routes={"*.weight": "matrix"})
    for index in range(3):
        weight = model[index].get_parameter("weight")
        layer = Layer("", weight, {}, optimizer._layout.spec_of(weight, optimizer.param_groups[0]))
        assert layer.weights.shape == (1, len(weight), weight[0].numel())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_recurrent_kernels_run_as_muon_and_the_table_says_so(kind: type[nn.Module]) -> None:
    def trained_with(method: type[MatrixOptimizer]) -> MatrixOptimizer:
        torch.manual_seed(0)
        model = nn.ModuleList([kind(5, 6), nn.Linear(6, 3)])
        optimizer = method(model, lr=0.02, momentum=0.8, routes={"1.weight": "adamw"})
        for step in range(6):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            found = model[0](x)
            hidden = found[0] if isinstance(found, tuple) else found
            optimizer.zero_grad()
            model[1](hidden).square().mean().backward()
            optimizer.step()
        return optimizer

    optimizer = trained_with(GoMuon)
    names = {r.name: r for r in optimizer.routing_table().treated("matrix")}
    assert all("weight_" in name for name in names)
    for entry in names.values():
        assert "cannot be captured: identity maps" in entry.reason
        assert entry.geometry == "identity"
    for route_ in names.values():
        assert set(optimizer.state[route_.parameter]) == {"momentum", "updates"}


class Parallel(nn.Module):
    """Experts of JetMoe and Granite, stored as torch stores a linear layer's weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.output_size = 4, inputs, outputs
        self.weight = nn.Parameter(torch.randn(4, outputs, inputs))


@pytest.mark.parametrize("sizes", [(6, 8), (8, 8)], ids=str)
def test_experts_that_say_their_sizes(sizes: tuple[int, int]) -> None:
    assert expert_weights(Parallel(*sizes)) == {"weight": False}


def test_experts_beside_identities() -> None:
    """LongCat counts both; one weight has rows for the identities as well."""
    module = KnownExperts((6, 12, 8), (4, 8, 6), hidden_size=8, num_routed_experts=4,
                          total_experts=6)  # fmt: skip
    del module.num_experts
    assert expert_weights(module) == {"gate_up_proj": False, "down_proj": False}


def test_a_matrix_with_heads_is_no_stack_of_as_many_matrices() -> None:
    layer = nn.Module()
    layer.q = nn.Parameter(torch.randn(32, 4, 8))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    reason = next(row.reason for row in route(model) if row.name == "1.q")
    assert "for one matrix with heads pass" in reason
    assert "LayerSpec(stack=False)" in reason
