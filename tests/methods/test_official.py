"""What every method says of public code: where it is, and that our settings make the same updates.

The public code itself is no dependency. Each method's plain reference in `references/` is written
from the same formulas, so here our optimizer, set as the recipe says, follows that reference.
"""

import inspect
import re
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gomuon
from gomuon.parameters.specs import LayerSpec
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import METHODS
from tests.methods import references
from tests.methods.references.cut_sides import CutSide
from tests.methods.references.data import ROWS, layer, learn, relative_error, rows

OWN = {name: m.recipe for name, m in METHODS.items() if m.__module__.startswith("gomuon.")}
# "owner/name", as on GitHub.
REPOSITORY = re.compile(r"(?<![\w./-])[A-Za-z0-9][\w-]*/[\w.-]+")
EQUAL = [
    (name, code)
    for name, recipe in OWN.items()
    for code in recipe.official
    if code.ours is not None and hasattr(references, name)
]


@pytest.mark.parametrize("recipe", OWN.values(), ids=OWN)
def test_a_method_after_public_code_names_it(recipe: Recipe) -> None:
    named = REPOSITORY.findall(recipe.origin)
    where = [code.where for code in recipe.official]
    for repository in named:
        assert any(one.startswith(f"{repository},") for one in where), f"{repository}: {where}"
    for code in recipe.official:
        assert REPOSITORY.match(code.where), code.where
        assert re.fullmatch(r"[0-9a-f]{40}|", code.commit), code.commit
    if any(code.ours is None for code in recipe.official):
        assert recipe.departures, "no settings make both equal: say why"
    assert all(sentence.endswith(".") for sentence in recipe.departures)


def test_most_methods_name_public_code() -> None:
    """So that the pattern of repositories is not one that finds nothing."""
    found = [name for name, recipe in OWN.items() if REPOSITORY.search(recipe.origin)]
    assert {"Muon", "Shampoo", "SOAP", "KFACMuon", "MuonSquared", "Scion"} <= set(found)
    assert not {"GoMuon", "FISMO", "Halfspace"} & set(found)


@pytest.mark.parametrize(("name", "code"), EQUAL, ids=lambda value: str(value)[:60])
def test_with_these_settings_it_follows_the_reference(name: str, code: OfficialCode) -> None:
    """40 updates in float64, so that also an interval of 32 has its first refresh."""
    assert code.ours is not None
    kind, recipe = METHODS[name], OWN[name]
    given = dict(code.ours)
    settings = {**recipe.preset(given.pop("preset", None)), **given}
    exact: dict[str, Any] = {"polar": "exact"} if "polar" in recipe.settings else {}
    module = layer(5, 5)
    optimizer = kind(module, **{"loss_reduction": "sum", **exact, **code.ours})
    reference_class = getattr(references, name)
    known = inspect.signature(reference_class).parameters
    reference = reference_class(
        module.weight.detach().clone(), **{k: v for k, v in settings.items() if k in known}
    )
    if settings.get("long_sides") == "diagonal":  # every side is longer than `max_side`
        reference.left = reference.right = CutSide(diagonal=True)
    for step in range(40):
        x, g = rows(2 * step, ROWS, 5), rows(2 * step + 1, ROWS, 5)
        learn(optimizer, module, x, g)
        reference.step(g.T @ x, x, g)
        assert relative_error(module.weight, reference.W) < 1e-8, f"update {step}"


# ---- what needs more than one linear layer -------------------------------------------------------


@pytest.mark.parametrize(
    ("conv", "length"),
    [
        (nn.Conv2d(3, 5, 3, bias=False), (5 / 3) ** 0.5 / 9),
        (nn.Conv2d(4, 2, (2, 3), bias=False), (2 / 4) ** 0.5 / 6),
        (nn.Conv1d(3, 6, 5, bias=False), (6 / 3) ** 0.5 / 5),
    ],
)
def test_scions_convolutions_have_the_published_length(conv: nn.Module, length: float) -> None:
    """√(out/in)/k² times the polar factor of the kernel as an out × in·k² matrix."""
    conv = conv.double()
    weight = conv.get_parameter("weight")
    optimizer = gomuon.Scion(conv, lr=0.1, radius=2.0, polar="exact", routes={"*": "matrix"})
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).double()
    U, _, Vh = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
    optimizer.step()
    expected = 0.9 * before - 0.1 * 2.0 * length * (U @ Vh).view_as(before)
    assert relative_error(weight, expected) < 1e-8


def test_convolutions_and_linear_layers_of_one_shape_each_have_their_length() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(2, 4, 3, bias=False), "linear": layer(4, 18)}).double()
    weights = dict(model.named_parameters())
    optimizer = gomuon.Scion(
        model, lr=1.0, constrained=False, polar="exact", routes={"*": "matrix"}
    )
    before = {name: p.detach().clone() for name, p in weights.items()}
    for p in weights.values():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).double()
    optimizer.step()
    moved = {name: float((p.detach() - before[name]).norm()) for name, p in weights.items()}
    assert moved["conv.weight"] == pytest.approx((4 / 2) ** 0.5 / 9 * 4**0.5)
    assert moved["linear.weight"] == pytest.approx((4 / 18) ** 0.5 * 4**0.5)


class MLP(nn.Module):
    """As in the public code: d → 4d → d, and a fused projection d → 3d."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.up, self.down = (
            nn.Linear(n, m, bias=False).double() for n, m in ((d, 3 * d), (d, 4 * d), (4 * d, d))
        )


def test_newton_muon_contracts_a_projection_in_four_blocks() -> None:
    """The MLP's projection from 4d to d: each block of d columns has its own K and ridge."""
    d, model = 4, MLP()
    ours: dict[str, Any] = {"lr": 4e-4, "aspect": "longest", "refresh_every": 3}
    optimizer = gomuon.NewtonMuon(
        model,
        **ours,
        specs={"down.weight": LayerSpec(inputs=d), "qkv.weight": LayerSpec(parts=3)},
        routes={"*": "matrix"},
        polar="exact",
        loss_reduction="sum",
    )
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    K = {name: [0.001 * torch.eye(d).double()] * (p.shape[1] // d) for name, p in weights.items()}
    inverses = {name: [torch.eye(d).double() for _ in blocks] for name, blocks in K.items()}
    for step in range(9):
        seen = {}
        loss = torch.zeros(()).double()
        for part, (name, module) in enumerate(model.named_children()):
            m, n = module.get_parameter("weight").shape
            x, g = rows(6 * step + part, ROWS, n), rows(6 * step + 3 + part, ROWS, m)
            loss = loss + (module(x) * g).sum()
            seen[f"{name}.weight"] = x, g.T @ x
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, (x, G) in seen.items():
            pieces = x.split(d, 1)
            if (step + 1) % 3 == 0:
                K[name] = [
                    0.95 * old + 0.05 * piece.T @ piece / ROWS
                    for old, piece in zip(K[name], pieces, strict=True)
                ]
                inverses[name] = [
                    torch.linalg.inv(S + (0.2 * S.trace() / d + 1e-8) * torch.eye(d).double())
                    for S in K[name]
                ]
            columns = zip(G.split(d, 1), inverses[name], strict=True)
            G = torch.cat([block @ inverse for block, inverse in columns], 1)
            momenta[name] = 0.95 * momenta[name] + G
            X = G + 0.95 * momenta[name]
            parts = X.split(d) if name.startswith("qkv") else (X,)
            sides = max(parts[0].shape)
            U = torch.cat([_polar(part) for part in parts])
            weights[name] = weights[name] - 4e-4 * sides**0.5 * U
    for name, p in model.named_parameters():
        assert relative_error(p, weights[name]) < 1e-10, name


def _polar(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


# ---- a clock whose refreshes come last -----------------------------------------------------------


@pytest.mark.parametrize("method", ["KFACMuon", "NewtonMuon"])
def test_capture_is_open_only_in_the_last_step_of_each_interval(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = METHODS[method](model, refresh_every=3)
    is_open, has_maps = [], []
    for _ in range(7):
        is_open.append(optimizer._capture.is_open)
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        has_maps.append(any("right_map" in state for state in optimizer.state.values()))
    assert is_open == [False, False, True, False, False, True, False]
    assert has_maps == [False, False, True, True, True, True, True]


def test_layers_that_take_turns_all_refresh_within_the_interval() -> None:
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)), nn.Linear(5, 2))
    optimizer = gomuon.KFACMuon(model, refresh_every=3, stagger=True)
    refreshed: dict[Tensor, list[int]] = {}
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        for p, state in optimizer.state.items():
            if state.get("right_seen") == step:
                refreshed.setdefault(p, []).append(step)
    matrices = [row for row in optimizer.routing_table() if row.treatment == "matrix"]
    assert len(refreshed) == len(matrices) >= 4
    assert all(second - first == 3 for first, second in refreshed.values())
    assert len({first for first, _ in refreshed.values()}) == 3
    assert sorted(chain(*refreshed.values()))[0] == 0


def test_kfac_muon_is_damped_before_the_first_refresh_of_each_layer() -> None:
    """(1 + √λ)^(−½)·I on both sides, while layers of one stack wait for different steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4))).double()
    settings: dict[str, Any] = {"damping": 0.25, "scale": 1.0, "lr": 1.0, "polar": "exact"}
    optimizer = gomuon.KFACMuon(
        model, refresh_every=4, stagger=True, routes={"*": "matrix"}, **settings
    )
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(16, 5).double()).square().sum().backward()
    optimizer.step()
    waiting = 0
    for p, W in zip(model.parameters(), before, strict=True):
        if "right_map" not in optimizer.state[p]:
            waiting += 1
            singular = torch.linalg.svdvals(W - p)
            torch.testing.assert_close(singular, torch.full_like(singular, 1 / 1.5))
    assert waiting == 3
