"""The paper's two controls follow plain loops written from their definitions; telemetry counts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Halfspace, Muon, MuonQK
from gomuon.functional import inverse_root, polar
from gomuon.telemetry import Alignment
from tests.models import language_loss, mlp, train, transformer


class PlainMuonQK:
    """ΔQ_h = ½·polar(M̂ C⁻¹)·C⁻¹, C = (K_hᵀK_h + λI)^½, one head after another."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model, self.lr = model, lr
        self.M: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, heads: int = 2, beta: float = 0.8, damping: float = 0.01) -> None:
        old = {name: p.clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            if p.ndim != 2 or "embedding" in name:
                continue
            G = p.grad
            assert G is not None
            self.M[name] = beta * self.M.get(name, torch.zeros_like(p)) + (1 - beta) * G
            source = (1 - beta) * G + beta * self.M[name]
            if ".q." not in name and ".k." not in name:
                m, n = p.shape
                p.sub_(self.lr * max(1, m / n) ** 0.5 * polar(source))
                continue
            partner = old[
                name.replace(".q.", ".k.") if ".q." in name else name.replace(".k.", ".q.")
            ]
            size = p.shape[0] // heads
            for head in range(heads):
                rows = slice(head * size, (head + 1) * size)
                gram = partner[rows].T @ partner[rows] + damping * torch.eye(p.shape[1]).double()
                values, vectors = torch.linalg.eigh(gram)
                C_inverse = vectors @ torch.diag(values**-0.5) @ vectors.T
                p[rows] -= self.lr * 0.5 * polar(source[rows] @ C_inverse) @ C_inverse


def test_muon_qk_follows_its_definition() -> None:
    model, plain = transformer(), transformer()
    optimizer, reference = MuonQK(model, lr=0.02, adamw={"lr": 0.0}), PlainMuonQK(plain, 0.02)
    for step in range(10):
        train(model, optimizer, range(step, step + 1))
        plain.zero_grad()
        language_loss(plain, step).backward()
        reference.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MuonQK(mlp(3, 4, 2)), "no module with query and key"),
        (lambda: MuonQK(transformer(), heads=3), "with rows divisible by 3 heads"),
        (lambda: MuonQK(transformer().parameters()), "pass the model"),
        (lambda: MuonQK(transformer(), partner_damping=0.0), "partner_damping must be"),
        (lambda: Halfspace(transformer(), tau=1.0), "tau must be"),
    ],
)
def test_bad_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_halfspace_is_inside_only_at_half_power_while_the_constraint_is_slack() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4, bias=False).double()
    optimizer = Halfspace(layer, lr=0.1, momentum=0.0)
    x = torch.randn(30, 5, dtype=torch.float64)
    before = layer.weight.detach().clone()
    layer(x).square().mean().backward()
    optimizer.step()
    assert layer.weight.grad is not None
    state = optimizer.state[layer.weight]
    B_half = inverse_root(state["left_factor"][0], 0.5)
    torch.testing.assert_close(state["left_map"][0], B_half)
    D = polar(B_half @ layer.weight.grad @ state["right_map"][0])
    assert float((layer.weight.grad * D).sum()) > 0
    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * D)


def test_halfspace_never_points_against_its_source() -> None:
    model = transformer()
    optimizer = Halfspace(model, lr=0.05)
    alignment = Alignment(optimizer)
    train(model, optimizer, range(12))
    assert alignment.negative_source == 0


def test_alignment_counts_and_can_be_removed() -> None:
    model = mlp(4, 4, 4, 2)
    optimizer = Muon(model, lr=0.0)
    alignment = Alignment(optimizer)
    x = torch.randn(9, 4, dtype=torch.float64)

    def step(sign: float) -> None:
        optimizer.zero_grad()
        (sign * model(x).square().sum()).backward()
        optimizer.step()

    for _ in range(6):
        step(1.0)
    assert (alignment.negative_source, alignment.negative_gradient) == (0, 0)
    # One reversed gradient, small beside the momentum: the source keeps its side.
    step(-0.01)
    assert alignment.negative_source == 0
    assert alignment.negative_gradient == 2
    alignment.remove()
    step(-0.01)
    assert alignment.negative_gradient == 2


def test_go_muon_never_points_against_its_source() -> None:
    model = transformer()
    optimizer = GoMuon(model)
    alignment = Alignment(optimizer)
    train(model, optimizer, range(20))
    assert alignment.negative_source == 0
