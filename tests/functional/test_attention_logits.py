"""The largest logit of each head, against the whole matrix of logits."""

import pytest
import torch
from torch import Tensor

from gomuon.functional import attention_logits
from gomuon.functional.attention_logits import clip_factors, largest_logits

INFINITY = float("inf")


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(query: Tensor, key: Tensor, scale: float, visible: Tensor) -> Tensor:
    """The same from all logits at once."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = torch.where(visible, query @ key.mT * scale, -INFINITY)
    return logits.amax((0, 2, 3))


MASKS = {
    "none": (None, torch.ones(7, 9, dtype=torch.bool)),
    "booleans": (states(3, 1, 7, 9) > 0, states(3, 1, 7, 9) > 0),
    "added": (
        torch.where(states(3, 1, 1, 9) > 0, 0.0, -INFINITY),
        states(3, 1, 1, 9) > 0,
    ),
    "large negative numbers": (
        torch.where(states(7, 9) > 0, 2.5, torch.finfo(torch.float32).min),
        states(7, 9) > 0,
    ),
    "a bias of positions": (states(4, 7, 9, seed=3), torch.ones(7, 9, dtype=torch.bool)),
}


@pytest.mark.parametrize("block", [10, 2**23], ids=["in blocks", "at once"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_the_largest_logits_are_those_of_the_whole_matrix(
    name: str, key_heads: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "_BLOCK", block)
    mask, visible = MASKS[name]
    query, key = states(3, 4, 7, 5), states(3, key_heads, 9, 5, seed=1)
    found = largest_logits(query, key, 0.3, mask)
    torch.testing.assert_close(found, whole(query, key, 0.3, visible), rtol=1e-12, atol=0)


@pytest.mark.parametrize("block", [10, 2**23], ids=["in blocks", "at once"])
def test_a_causal_attention_does_not_see_later_positions(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "_BLOCK", block)
    query, key = states(3, 4, 7, 5), states(3, 4, 7, 5, seed=1)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    found = largest_logits(query, key, 1.0, is_causal=True)
    torch.testing.assert_close(found, whole(query, key, 1.0, visible), rtol=1e-12, atol=0)
    assert bool((found < largest_logits(query, key, 1.0)).any())


def test_a_head_that_sees_nothing_has_no_logit() -> None:
    mask = torch.zeros(4, 1, 1, dtype=torch.bool)
    found = largest_logits(states(3, 4, 7, 5), states(3, 4, 7, 5), 1.0, mask)
    assert found.tolist() == [-INFINITY] * 4
    assert largest_logits(states(0, 4, 7, 5), states(0, 4, 7, 5), 1.0).tolist() == [-INFINITY] * 4


def test_half_precision_is_multiplied_in_float32() -> None:
    query, key = states(1, 1, 7, 64).bfloat16(), states(1, 1, 7, 64, seed=1).bfloat16()
    found = largest_logits(query, key, 1.0)
    assert found.dtype == torch.float32
    assert float(found) == float((query.float() @ key.float().mT).max())


def test_only_heads_above_the_threshold_have_a_factor_below_one() -> None:
    largest = torch.tensor([5.0, 20.0, 10.0, -40.0, INFINITY, -INFINITY, float("nan")])
    assert clip_factors(largest, 10.0).tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
