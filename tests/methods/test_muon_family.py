"""Muon's younger relatives follow the plain references written from their formulas."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon.functional import linalg
from gomuon.functional.polar_express import published_polar_express
from gomuon.functional.spectra import leading_projector
from gomuon.methods.gluon import radius
from gomuon.optimizer import MatrixOptimizer
from tests.methods import references
from tests.methods.references.data import SHAPES, layer, relative_error, rows
from tests.methods.table import values
from tests.methods.test_recipes import PRECISIONS, Case, assert_follows
from tests.models import mlp, train, transformer

CASES = [
    Case("Moonlight"),
    Case("Moonlight", {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0}),
    Case("PolarExpressMuon"),
    Case("PolarExpressMuon", {"polar_steps": 9, "nesterov": False, "weight_decay": 0.1}),
    Case("NorMuon"),
    Case("NorMuon", {"square_decay": 0.5, "nesterov": False, "weight_decay": 0.1}),
    Case("AdaMuon", {"sign": False}),
    Case("AdaMuon", {"sign": False, "square_decay": 0.9, "eps": 1e-3, "nesterov": False}),
    Case("SAMuon"),
    Case("SAMuon", {"gamma": 1.5, "nesterov": False, "weight_decay": 0.1}),
    Case("MuonHyperball"),
    Case("MuonHyperball", {"lr": 0.3, "nesterov": True, "momentum": 0.5}),
    Case("Dion"),
    Case("Dion", {"rank_fraction": 0.5, "momentum": 0.8, "weight_decay": 0.0}),
    Case("ModularNorm"),
    Case("ModularNorm", {"nesterov": True, "momentum": 0.8, "weight_decay": 0.1}),
    Case("Gluon"),
    Case("Gluon", {"measure_steps": 5, "momentum": 0.5}),
    Case("Gluon", {"measure_steps": 12, "weight_decay": 0.1, "lr": 0.1}),
    Case("Gluon", {"measure_steps": 3, "largest_radius": 0.3}),
]
# Signs of a float32 source differ from those of float64 where it is nearly zero.
ONLY_FLOAT64 = [Case("AdaMuon"), Case("AdaMuon", {"square_decay": 0.5, "weight_decay": 0.0})]


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_its_reference(
    case: Case, shape: str, dtype: torch.dtype, steps: int, tolerance: float
) -> None:
    assert_follows(case, SHAPES[shape], tolerance, dtype=dtype, steps=steps)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", ONLY_FLOAT64, ids=str)
def test_signs_follow_their_reference(case: Case, shape: str) -> None:
    assert_follows(case, SHAPES[shape])


@pytest.mark.parametrize("method", sorted({case.method for case in CASES}))
def test_defaults_are_those_of_the_reference(method: str) -> None:
    ours = getattr(gomuon, method)
    theirs = inspect.signature(getattr(references, method)).parameters
    published = {name: p.default for name, p in theirs.items() if name != "W"}
    assert {name: ours.recipe.defaults[name] for name in published} == published


# ---- lengths -------------------------------------------------------------------------------------


def moved(model: nn.Module, optimizer: MatrixOptimizer, name: str) -> Tensor:
    """How far one step moves a parameter, per unit of its rate."""
    before = model.get_parameter(name).detach().clone()
    train(model, optimizer, range(1))
    return (before - model.get_parameter(name).detach()) / optimizer.param_groups[0]["lr"]


def test_a_hyperball_keeps_norms_and_steps_a_share_of_them() -> None:
    model = transformer(layers=1)
    optimizer = gomuon.MuonHyperball(model, lr=0.05)
    matrices = [row.name for row in optimizer.routing_table().treated("matrix")]
    for step in range(10):
        before = values(model)
        train(model, optimizer, range(step, step + 1))
        for name in matrices:
            W, old = model.get_parameter(name).detach(), before[name]
            assert float(W.norm() / old.norm()) == pytest.approx(1, abs=1e-12)
            # A step of .05 and the way back to the sphere: an angle of at most arcsin .05.
            cosine = float((W * old).sum() / old.norm() ** 2)
            assert 1 - 1.3e-3 < cosine < 1


def test_a_hyperball_in_bfloat16_stays_at_its_radius() -> None:
    """Its weights are rounded in every step; the radius is not measured anew."""
    model = transformer(layers=1, dtype=torch.bfloat16)
    optimizer = gomuon.MuonHyperball(model, lr=0.05, state_dtype="bfloat16")
    name = optimizer.routing_table().treated("matrix")[0].name
    first = float(model.get_parameter(name).float().norm())
    train(model, optimizer, range(40))
    assert float(model.get_parameter(name).float().norm()) == pytest.approx(first, rel=1e-3)
    assert optimizer.state[model.get_parameter(name)]["radius"].dtype == torch.float32


def test_a_hyperball_refuses_weights_of_zeros() -> None:
    model = mlp(4, 5, 5, 3)
    nn.init.zeros_(model.get_parameter("0.weight"))
    optimizer = gomuon.MuonHyperball(model)
    model(torch.randn(6, 4).double()).square().sum().backward()
    with pytest.raises(ValueError, match=r"the weights of '0\.weight' are zero.*routes="):
        optimizer.step()


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_published_polar_express_is_a_rough_polar_factor(shape: tuple[int, int]) -> None:
    X = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).double()
    sigma = torch.linalg.svdvals(published_polar_express(X, 5))
    assert 0.05 < float((sigma - 1).abs().max()) < 0.35, "five steps leave a tenth or two"
    sigma = torch.linalg.svdvals(published_polar_express(X, 10))
    assert float((sigma - 1).abs().max()) < 1e-3
    assert not published_polar_express(torch.zeros_like(X), 5).any()


def test_the_leading_projector_shares_equal_eigenvalues() -> None:
    V = torch.linalg.qr(torch.randn(5, 5).double())[0]
    one = V @ torch.diag(torch.tensor([3.0, 2.9, 1.0, 0.0, 0.0]).double()) @ V.T
    torch.testing.assert_close(leading_projector(one), V[:, :1] @ V[:, :1].T)
    two = V @ torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.0, 0.0]).double()) @ V.T
    torch.testing.assert_close(leading_projector(two), V[:, :2] @ V[:, :2].T / 2)
    assert not leading_projector(torch.zeros(2, 3, 3)).any()


def test_ada_muon_moves_by_adamws_root_mean_square() -> None:
    model = mlp(4, 6, 7, 3)
    optimizer = gomuon.AdaMuon(model, lr=1e-2, weight_decay=0.0)
    before = values(model)
    model(torch.randn(9, 4).double()).square().sum().backward()
    optimizer.step()
    for name in ("0.weight", "2.weight"):
        step = model.get_parameter(name).detach() - before[name]
        assert float(step.square().mean().sqrt()) == pytest.approx(0.2e-2)


# ---- Dion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_fraction", [0.25, 0.5, 1.0])
def test_dions_step_has_its_rank_and_the_rest_stays(rank_fraction: float) -> None:
    module = layer(8, 12)
    optimizer = gomuon.Dion(module, rank_fraction=rank_fraction, weight_decay=0.0, momentum=0.9)
    G = torch.randn(8, 12).double()
    before = module.weight.detach().clone()
    module.weight.grad = G.clone()
    optimizer.step()
    step = before - module.weight.detach()
    r = int(8 * rank_fraction)
    assert int(torch.linalg.matrix_rank(step, rtol=1e-9)) == r
    M = optimizer.state[module.weight]["momentum"]
    # What is taken is the projection of G on r directions; a tenth of it leaves the momentum.
    sigma = torch.linalg.svdvals((G - M) / 0.1)
    assert int((sigma > 1e-9).sum()) == r
    Q = optimizer.state[module.weight]["right_vectors"]
    torch.testing.assert_close(Q.norm(dim=-2), torch.ones(1, r).double(), rtol=1e-6, atol=0)


def test_dion_by_products_is_dion_by_qr(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [transformer(layers=1) for _ in range(2)]
    optimizers = [gomuon.Dion(model, rank_fraction=0.5) for model in models]
    train(models[0], optimizers[0], range(8))
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    monkeypatch.setattr(torch.linalg, "qr", None)  # not called
    train(models[1], optimizers[1], range(8))
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative_error(q, p.detach()) < 1e-9, name


# ---- the modular norm ----------------------------------------------------------------------------


class Everything(nn.Module):
    """An embedding, convolutions with two kernels, a hidden layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.symbols = nn.Embedding(7, 8)
        self.conv = nn.Conv1d(8, 6, 3, bias=False)
        self.mixed = nn.Conv1d(6, 6, 1, bias=False)
        self.hidden = nn.Linear(18, 36, bias=False)
        self.head = nn.Linear(36, 7, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.symbols(x).mT)
        y: Tensor = self.head(torch.tanh(self.hidden(torch.tanh(self.mixed(h)).flatten(1))))
        return y


@pytest.mark.parametrize("hidden_mass", [None, 5.0])
def test_every_kind_of_layer_takes_its_dual_step(hidden_mass: float | None) -> None:
    model = Everything()
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    optimizer = gomuon.ModularNorm(model, hidden_mass=hidden_mass, polar="exact", **settings)
    assert {row.treatment for row in optimizer.routing_table()} == {"matrix"}
    of_hidden = 1.0 if hidden_mass is None else hidden_mass / 3
    total = 2 + 3 * of_hidden

    def reference(name: str, kind: Any = references.ModularNorm, **more: Any) -> Any:
        W = model.get_parameter(f"{name}.weight").detach().flatten(1)
        mass = 1.0 if name in ("symbols", "head") else of_hidden
        return kind(W, **more, mass=mass, total_mass=total, **settings)

    plain = {
        "symbols": reference("symbols", references.ModularEmbedding),
        "conv": reference("conv", references.ModularConvolution, inputs=8),
        "mixed": reference("mixed", references.ModularConvolution, inputs=6),
        "hidden": reference("hidden"),
        "head": reference("head"),
    }
    for step in range(8):
        x = torch.randint(0, 6, (40, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) * rows(step, 40, 7)).sum().backward()
        gradients = {name: model.get_parameter(f"{name}.weight").grad for name in plain}
        for name, one in plain.items():
            G = gradients[name]
            assert G is not None
            one.step(G.flatten(1), G, G)
        optimizer.step()
    for name, one in plain.items():
        assert relative_error(model.get_parameter(f"{name}.weight").flatten(1), one.W) < 1e-8, name
    decayed = (1 - 0.05 * 0.1) ** 8
    first = Everything().symbols.weight.detach()
    torch.testing.assert_close(
        model.symbols.weight.detach()[6], decayed * first[6], rtol=1e-12, atol=0
    )


def test_a_tied_embedding_stays_adamws() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    table = gomuon.ModularNorm(model).routing_table()
    assert {row.name: row.treatment for row in table} == {
        "0.weight": "adamw",
        "1.weight": "matrix",
        "1.bias": "adamw",
    }


def test_a_wrong_kernel_is_named() -> None:
    model = mlp(4, 5, 5, 3)
    optimizer = gomuon.ModularNorm([{"params": list(model.parameters()), "kernel": 9}])
    model(torch.randn(6, 4).double()).square().sum().backward()
    with pytest.raises(ValueError, match=r"kernel=9 is not the number of places.* 4 inputs in all"):
        optimizer.step()


def test_a_mass_of_one_layer_changes_that_layer() -> None:
    steps = {}
    for mass in (1.0, 3.0):
        model = transformer(layers=1)
        name = "trunk.blocks.0.mlp.up.weight"
        optimizer = gomuon.ModularNorm(model, overrides={name: {"mass": mass}})
        steps[mass] = moved(model, optimizer, name)
    torch.testing.assert_close(steps[3.0], 3 * steps[1.0])


# ---- Gluon ---------------------------------------------------------------------------------------


def test_the_line_has_no_constant_below_zero() -> None:
    """Means 2 and 6 of x and y: through zero at most slope 3, flat at least slope 0."""
    x = torch.tensor([4.0]).view(1, 1, 1)
    for covariance, smoothness in ((9.0, 3 * 4.0), (-1.0, 6.0), (1.5, 6 + 1.5 * 2), (0.0, 6.0)):
        seen = torch.tensor([[[2.0, 6.0, 1.0, covariance]]])
        torch.testing.assert_close(radius(seen, x, 10.0), x / smoothness)
    one_pair = torch.tensor([[[2.0, 6.0, 0.0, 0.0]]])
    torch.testing.assert_close(radius(one_pair, x, 10.0), torch.full((1, 1, 1), 1 / 3))
    assert float(radius(one_pair, x, 0.1)) == pytest.approx(0.1)
    assert float(radius(torch.zeros(1, 1, 4), x, 10.0)) == 1


def test_radii_differ_by_layer_and_follow_the_schedule() -> None:
    model = transformer(layers=1)
    optimizer = gomuon.Gluon(model, lr=0.02, measure_steps=6, polar="exact")
    train(model, optimizer, range(6))
    up, down = (f"trunk.blocks.0.mlp.{name}.weight" for name in ("up", "down"))
    lengths = {}
    for lr in (0.02, 0.01):
        for group in optimizer.param_groups[:1]:
            group["lr"] = lr
        before = values(model)
        train(model, optimizer, range(6, 7))
        for name in (up, down):
            W = model.get_parameter(name).detach()
            step = torch.linalg.matrix_norm(W - before[name], 2)
            m, n = W.shape
            lengths[name, lr] = float(step) / lr / (m / n) ** 0.5
    assert len({round(lengths[name, 0.02], 3) for name in (up, down)}) == 2
    for name in (up, down):
        assert lengths[name, 0.01] == pytest.approx(lengths[name, 0.02], rel=0.5)
        assert lengths[name, 0.02] != pytest.approx(1, abs=1e-3), "no longer the plain radius"
