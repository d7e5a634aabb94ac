"""The transformers have the paper's shape, start and causality."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gomuon.lab.experiments.models import (
    CausalTransformer,
    CharacterModel,
    ModularAdditionModel,
    rotary_tables,
    rotate,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_character_model_has_the_papers_matrices() -> None:
    model = CharacterModel(50)
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    assert shapes.count((128, 128)) == 12  # q k v o in three layers
    assert shapes.count((384, 128)) == 6  # gate and up
    assert shapes.count((128, 384)) == 3  # down
    assert len(shapes) == 21
    assert not any("bias" in name for name, _ in model.named_parameters())
    assert sum(isinstance(m, nn.RMSNorm) for m in model.modules()) == 7


def test_initial_parameters_are_normal_with_deviation_002_and_norms_one() -> None:
    model = CharacterModel(50, generator=seeded(1))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 2e-3, name


def test_initial_parameters_come_from_the_generator_alone() -> None:
    first = CharacterModel(20, generator=seeded(3))
    torch.manual_seed(99)
    second = CharacterModel(20, generator=seeded(3))
    other = CharacterModel(20, generator=seeded(4))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_output_head_is_the_embedding() -> None:
    model = CharacterModel(11, width=8, layers=1, heads=2, hidden=8)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(tokens)[..., 7].sum().backward()
    grad = model.embedding.weight.grad
    assert grad is not None
    assert grad[7].abs().sum() > 0  # symbol 7 is never read, only predicted
    assert grad[5].abs().sum() == 0


def test_no_position_sees_its_future() -> None:
    model = CharacterModel(11, width=16, layers=2, heads=2, hidden=16)
    tokens = torch.randint(11, (2, 9), generator=seeded(0))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-7)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-7)


def test_rotary_turns_halves_by_the_positions_angle() -> None:
    cosines, sines = rotary_tables(5, 4, torch.device("cpu"))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(5, 4)
    turned = rotate(x, cosines, sines)
    angle = torch.tensor(3 * 10_000.0 ** (-2 / 4))  # position 3, second pair (2, 4)
    assert turned[3, 1].item() == pytest.approx((2 * angle.cos() - 4 * angle.sin()).item())
    assert turned[3, 3].item() == pytest.approx((4 * angle.cos() + 2 * angle.sin()).item())
    assert torch.equal(turned[0], x[0])


def test_rotary_products_depend_on_the_distance_alone() -> None:
    cosines, sines = rotary_tables(10, 8, torch.device("cpu"))
    q, k = torch.randn(2, 8, generator=seeded(0))
    turned_q = rotate(q.expand(10, 8), cosines, sines)
    turned_k = rotate(k.expand(10, 8), cosines, sines)
    scores = turned_q @ turned_k.T
    assert torch.allclose(scores.diagonal(2), scores.diagonal(2)[0].expand(8), atol=1e-5)


def test_modular_model_reads_at_an_independent_cls() -> None:
    model = ModularAdditionModel(7, width=8, layers=1, heads=2, hidden=8)
    pairs = torch.tensor([[1, 2], [3, 4], [6, 6]])
    logits = model(pairs)
    assert logits.shape == (3, 7)
    assert model.embedding.weight.shape == (7, 8)
    assert model.cls.shape == (8,)
    with torch.no_grad():
        model.cls.add_(1.0)
    assert not torch.allclose(model(pairs), logits)


def test_modular_model_tells_a_from_b() -> None:
    model = ModularAdditionModel(7, generator=seeded(0))
    assert not torch.allclose(
        model(torch.tensor([[1, 2]])), model(torch.tensor([[2, 1]])), atol=1e-7
    )


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ({"width": 10, "heads": 4}, "width \\(10\\)"),
        ({"width": 12, "heads": 4}, "width \\(12\\)"),  # heads of odd width cannot be rotated
        ({"layers": 0}, "layers"),
        ({"heads": 0}, "heads"),
        ({"hidden": -1}, "hidden"),
    ],
)
def test_impossible_shapes_are_named(shape: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CausalTransformer(**shape)
