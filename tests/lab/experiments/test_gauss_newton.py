"""Full Gauss–Newton as an oracle: the dense matrix's step; large models are refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import gomuon
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.gauss_newton import LARGEST, GaussNewton
from gomuon.lab.experiments.models import CharacterModel
from gomuon.lab.experiments.racing import race_plan
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running import training
from tests.lab.test_cli import refused

NAME = "gauss-newton"


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (9,), generator=generator)


def dense_step(model: nn.Module, x: Tensor, y: Tensor, damping: float) -> Tensor:
    """(JᵀHJ/N + damping·I)⁻¹g, every matrix written out."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def logits(values: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(model, values, (x,))
        return found

    J = torch.cat([each.flatten(2) for each in jacrev(logits)(values).values()], 2)
    P = logits(values).softmax(-1)
    H = torch.diag_embed(P) - P[:, :, None] * P[:, None, :]
    curvature = torch.einsum("nip,nij,njq->pq", J, H, J) / len(x)
    g = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    identity = torch.eye(len(curvature)).double()
    return torch.linalg.solve(curvature + damping * identity, torch.cat([p.flatten() for p in g]))


def test_its_step_is_that_of_the_dense_matrix() -> None:
    model, (x, y) = classifier(), batch()
    want = dense_step(model, x, y, damping=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = GaussNewton(model, 1.0, damping=0.1, iterations=100, tolerance=1e-8)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        model(torch.ones(2, 4).double())  # an evaluation in between is not the batch
    optimizer.step()
    after = zip(before, model.parameters(), strict=True)
    found = torch.cat([(old - new.detach()).flatten() for old, new in after])
    assert float((found - want).norm() / want.norm()) < 1e-4
    assert float(torch.cosine_similarity(found, want, dim=0)) > 1 - 1e-8


def test_a_character_model_learns_one_batch() -> None:
    """Its attention and its rows of positions go through, too."""
    model = CharacterModel(7, width=8, layers=1, heads=2, hidden=8,
                           generator=torch.Generator().manual_seed(0))  # fmt: skip
    optimizer = GaussNewton(model, 0.5, damping=0.1, iterations=5)
    symbols = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_large_models_are_refused_in_words() -> None:
    model = nn.Linear(LARGEST, 2, bias=False, device="meta")
    with pytest.raises(LabError, match=r"small models, of at most 200,000 .* has 400,000"):
        GaussNewton(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": 0.0}, "damping must be a number > 0, got 0.0"),
        ({"tolerance": -1.0}, "tolerance must be a number > 0, got -1.0"),
        ({"iterations": 0}, "iterations must be a whole number >= 1, got 0"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, float], match: str) -> None:
    with pytest.raises(LabError, match=f"invalid settings of optimizer 'gauss-newton': .*{match}"):
        optimizers.build(NAME, classifier(), 0.5, 3e-3, options)


def test_a_gradient_that_is_not_finite_is_a_divergence() -> None:
    model, (x, y) = classifier(), batch()
    optimizer = GaussNewton(model)
    (F.cross_entropy(model(x), y) * torch.nan).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gomuon.NonFiniteGradientError, match="gauss-newton"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_needs_a_forward_pass() -> None:
    with pytest.raises(ValueError, match="needs a forward pass"):
        GaussNewton(classifier()).step()


def test_it_races_by_name() -> None:
    plan = race_plan("digits-vit", f"{NAME},muon", steps=4)
    assert [arm.optimizer for arm in plan.arms] == [NAME, "muon"]
    assert plan.arms[0].title.startswith("Gauss–Newton")
    assert optimizers.default_rate(NAME, "digits-vit") == plan.arms[0].lr


def test_a_run_trains() -> None:
    config = RunConfig(
        task="digits-vit", optimizer=NAME, lr=0.1, seed=0, steps=2, width=8, layers=1, heads=2,
        hidden=8, batch=16, evaluate_every=5, options={"iterations": 3},
    )  # fmt: skip
    session = training.Session(config)
    before = copy.deepcopy(session.model.state_dict())
    lines = [session.update(step)[0] for step in (1, 2)]
    assert all(line["loss"] > 0 for line in lines)
    now = session.model.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in now.items())


def test_its_costs_are_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["plan", "character", "--optimizers", NAME], capsys)
    assert "gauss-newton is an oracle for small models in gomuon race" in message
