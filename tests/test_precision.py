"""Mixed precision: scaled losses, low-precision activations and weights, float32 statistics."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gomuon import GoMuon, Muon
from gomuon.optimizer import MatrixOptimizer
from tests.models import language_loss, mlp, train, transformer

NAME = "trunk.blocks.0.attention.v.weight"


def scaled_training(
    model: nn.Module,
    optimizer: MatrixOptimizer,
    scales: list[float],
    *,
    unscale_first: bool = False,
    poisoned: frozenset[int] = frozenset(),
) -> None:
    """Train under a GradScaler that takes the given scales, one a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    optimizer.use_scaler(scaler)
    for step, scale in enumerate(scales):
        assert scaler.get_scale() == scale
        optimizer.zero_grad()
        loss = language_loss(model, step)
        if step in poisoned:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(scales[(step + 1) % len(scales)])


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_changing_loss_scale_changes_nothing(unscale_first: bool) -> None:
    """Powers of two: the same to the last bit, whether or not the user unscales for clipping."""
    scaled, plain = transformer(dtype=torch.float32), transformer(dtype=torch.float32)
    scales = [2.0**power for power in (10, 10, 14, 14, 3, 3, 16, 16, 1, 1)]
    optimizer = GoMuon(scaled, refresh_every=2)
    scaled_training(scaled, optimizer, scales, unscale_first=unscale_first)
    train(plain, GoMuon(plain, refresh_every=2), range(len(scales)))
    for (name, p), q in zip(scaled.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_not_knowing_the_scaler_shows() -> None:
    """The test above can fail: statistics of differing scales make another average."""
    told, untold = transformer(dtype=torch.float32), transformer(dtype=torch.float32)
    first, second = GoMuon(told, refresh_every=1), GoMuon(untold, refresh_every=1)
    second.use_scaler = lambda scaler: None  # type: ignore[method-assign]
    for model, optimizer in ((told, first), (untold, second)):
        scaled_training(model, optimizer, [2.0**4, 2.0**10, 2.0**4])
    assert not torch.equal(told.get_parameter(NAME), untold.get_parameter(NAME))


def test_a_step_skipped_for_infinity_leaves_no_statistics() -> None:
    skipped, clean = transformer(dtype=torch.float32), transformer(dtype=torch.float32)
    first, second = GoMuon(skipped, refresh_every=2), GoMuon(clean, refresh_every=2)
    scaled_training(skipped, first, [1.0] * 3, poisoned=frozenset({0}))
    for step in (1, 2):
        train(clean, second, range(step, step + 1))
    for p, q in zip(skipped.parameters(), clean.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_float32_statistics(dtype: torch.dtype) -> None:
    model, full = transformer(dtype=torch.float32), transformer(dtype=torch.float32)
    optimizer, other = GoMuon(model, lr=0.02), GoMuon(full, lr=0.02)
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = language_loss(model, step)
        loss.backward()
        optimizer.step()
        train(full, other, range(step, step + 1))
    state = optimizer.state[model.get_parameter(NAME)]
    assert {state[key].dtype for key in ("momentum", "left_factor", "left_map")} == {torch.float32}
    for p, q in zip(model.parameters(), full.parameters(), strict=True):
        assert p.isfinite().all()
        assert torch.nn.functional.cosine_similarity(p.flatten(), q.flatten(), dim=0) > 0.9


def test_bfloat16_weights_follow_float32_ones() -> None:
    model, full = transformer(dtype=torch.bfloat16), transformer(dtype=torch.float32)
    full.load_state_dict(model.state_dict())
    train(model, GoMuon(model, lr=0.02), range(8))
    train(full, GoMuon(full, lr=0.02), range(8))
    for p, q in zip(model.parameters(), full.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(p.flatten().float(), q.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("method", [GoMuon, Muon])
def test_a_step_inside_autocast_is_taken_in_full_precision(
    method: Callable[..., MatrixOptimizer],
) -> None:
    inside, outside = transformer(dtype=torch.float32), transformer(dtype=torch.float32)
    for model, optimizer in ((inside, method(inside)), (outside, method(outside))):
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = language_loss(model, step)
                loss.backward()
                if model is inside:
                    optimizer.step()
            if model is outside:
                optimizer.step()
    for (name, p), q in zip(inside.named_parameters(), outside.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_sampled_labels_never_had_the_loss_scale() -> None:
    """Their loss is not the one the scaler scales."""
    factors = []
    for scale in (1.0, 2.0**10):
        model = mlp(6, 5, 5, 3)
        optimizer = GoMuon(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer.use_scaler(scaler)
        logits = model(torch.ones(4, 6, dtype=torch.float64))
        optimizer.sample_labels(logits, torch.Generator().manual_seed(0))
        scaler.scale(logits.square().mean()).backward()
        scaler.step(optimizer)
        factors.append(optimizer.state[model.get_parameter("2.weight")]["left_factor"])
    assert torch.equal(*factors)


def test_a_copy_keeps_the_scaler() -> None:
    model = mlp(6, 5, 3)
    optimizer, scaler = GoMuon(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.use_scaler(scaler)
    assert copy.deepcopy(optimizer)._capture.scaler is scaler
    new_scaler, new_optimizer = copy.deepcopy((scaler, optimizer))
    assert new_optimizer._capture.scaler is new_scaler


def test_an_input_written_to_under_autocast_is_refused_not_misread() -> None:
    """The layer keeps a rounded copy; the statistics would need what is no longer there."""
    layer = nn.Linear(4, 4)
    optimizer = GoMuon(layer)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert not optimizer.state
