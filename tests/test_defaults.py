"""torch's default device and default dtype are the user's affair: no step depends on them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.methods.kfac import kl_clip
from tests.methods.table import EVERY_RECIPE, assert_equal, biased_transformer, make
from tests.models import language_loss, mlp


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def default(name: str) -> AbstractContextManager[Any]:
    if name == "with meta":
        return torch.device("meta")
    if name == "meta":
        return default_device("meta")
    return default_dtype(getattr(torch, name))


EVERY_DEFAULT = pytest.mark.parametrize("name", ["with meta", "meta", "float64", "bfloat16"])


@EVERY_RECIPE
@EVERY_DEFAULT
def test_steps_do_not_depend_on_torchs_defaults(
    method: str, settings: dict[str, Any], name: str
) -> None:
    """Steps that make the state, renew the geometry and reuse it, bit for bit."""
    plain, model = (biased_transformer(0, torch.float32) for _ in range(2))
    first = make(method, plain, **settings)
    with default(name):
        second = make(method, model, **settings)
    for step in range(6):
        for net, optimizer in ((plain, first), (model, second)):
            optimizer.zero_grad()
            language_loss(net, step).backward()
        first.step()
        with default(name):
            second.step()
    assert_equal(plain, model)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert first.state[p].keys() == second.state[q].keys()
        for key, value in first.state[p].items():
            if isinstance(value, Tensor):
                other = second.state[q][key]
                assert (value.dtype, value.device) == (other.dtype, other.device), key
                assert torch.equal(value, other), key


@EVERY_DEFAULT
@pytest.mark.parametrize("masked", [False, True])
def test_capture_does_not_depend_on_torchs_defaults(name: str, masked: bool) -> None:
    """Forward pass, backward pass and sampled labels, with the gate open and closed."""
    models = [mlp(6, 8, 8, 3, dtype=torch.float32) for _ in range(2)]
    optimizers = [GoMuon(model) for model in models]

    def learn(model: nn.Module, optimizer: GoMuon, batch: Tensor, mask: Tensor) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        optimizer.zero_grad()
        if masked:
            with optimizer.statistics_mask(mask):
                logits = model(batch)
        else:
            logits = model(batch)
        optimizer.sample_labels(logits, generator)
        logits.square().mean().backward()
        optimizer.step()

    for step in range(6):
        batch = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(step))
        mask = (batch[..., 0] > 0).float()
        learn(models[0], optimizers[0], batch, mask)
        with default(name):
            learn(models[1], optimizers[1], batch, mask)
    assert_equal(*models)


def test_a_rank_without_matrices_adds_a_zero_of_the_others_kind() -> None:
    """K-FAC's clip sums over ranks; every rank must send the same kind of number."""
    sent: list[Tensor] = []

    def total(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    assert list(kl_clip([], {"kl_clip": 0.001, "lr": 0.1}, total)) == []
    assert [(value.dtype, value.item()) for value in sent] == [(torch.float64, 0.0)]
