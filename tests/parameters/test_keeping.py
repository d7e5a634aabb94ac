"""State in fewer bits: how much it takes, how far training moves, and what may be loaded."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Mousse, Muon, MuonSquared, Shampoo
from gomuon.functional.narrow import BLOCK, from_codes, to_bfloat16, to_codes
from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import make, saved
from tests.models import mlp, train, transformer

NARROW = pytest.mark.parametrize("form", ["bfloat16", "int8"])
UP = "trunk.blocks.0.mlp.up.weight"


def matrix_state(optimizer: MatrixOptimizer) -> list[dict[str, Any]]:
    return [entries for entries in optimizer.state.values() if "momentum" in entries]


def bytes_of(optimizer: MatrixOptimizer, *names: str) -> int:
    tensors = {
        (value.data_ptr(), value.nbytes)
        for entries in matrix_state(optimizer)
        for name, value in entries.items()
        if isinstance(value, Tensor) and (not names or name in names)
    }
    return sum(size for _, size in tensors)


def trained(
    form: str | None, steps: int = 6, method: Any = GoMuon, **settings: Any
) -> tuple[nn.Module, MatrixOptimizer]:
    model = transformer(dtype=torch.float32, layers=1)
    optimizer = method(model, state_dtype=form, **settings)
    train(model, optimizer, range(steps))
    return model, optimizer


# ---- how much it takes -------------------------------------------------------------------------


@pytest.mark.parametrize("method", [GoMuon, Muon])
def test_bfloat16_takes_exactly_half(method: type[MatrixOptimizer]) -> None:
    wide, narrow = (trained(form, method=method)[1] for form in (None, "bfloat16"))
    assert 2 * bytes_of(narrow) == bytes_of(wide)


def test_int8_takes_a_quarter_of_the_momentum_and_its_scales() -> None:
    wide, narrow = (trained(form)[1] for form in (None, "int8"))
    assert 4 * bytes_of(narrow, "momentum") == bytes_of(wide, "momentum")
    elements = [entries["momentum"].numel() for entries in matrix_state(narrow)]
    assert bytes_of(narrow, "momentum_scales") == 4 * sum(-(-n // BLOCK) for n in elements)
    factors = ("left_factor", "left_map", "right_map")
    assert 2 * bytes_of(narrow, *factors) == bytes_of(wide, *factors)


def test_squares_and_grams_of_gradients_are_kept_as_computed() -> None:
    _, squared = trained("int8", method=MuonSquared)
    assert {entries["square"].dtype for entries in matrix_state(squared)} == {torch.float32}
    for method in (Shampoo, Mousse):
        _, optimizer = trained("int8", method=method)
        for entries in matrix_state(optimizer):
            assert entries["left_factor"].dtype == torch.float32
            assert entries["left_map"].dtype == torch.bfloat16


def test_stacks_are_views_as_ever() -> None:
    model, optimizer = trained("int8")
    for name in ("momentum", "momentum_scales", "left_map", "right_map"):
        kept = {
            optimizer.state[model.get_parameter(f"trunk.blocks.0.attention.{x}.weight")][name]
            .untyped_storage()
            .data_ptr()
            for x in "qkvo"
        }
        assert len(kept) == 1, name


def test_layers_share_what_they_share() -> None:
    model, optimizer = trained("bfloat16", input_decay=0.9)
    q, k, o = (
        optimizer.state[model.get_parameter(f"trunk.blocks.0.attention.{x}.weight")]["right_factor"]
        for x in "qko"
    )
    assert q.dtype == torch.bfloat16
    assert q.data_ptr() == k.data_ptr() != o.data_ptr()


# ---- how far training moves --------------------------------------------------------------------


def moved(form: str | None, steps: int, seed: int) -> Tensor:
    model = transformer(seed, torch.float32, layers=1)
    optimizer = make("GoMuon", model, lr=0.002, state_dtype=form)
    names = [row.name for row in optimizer.routing_table().treated("matrix")]
    before = [model.get_parameter(name).detach().clone() for name in names]
    train(model, optimizer, range(steps))
    return torch.cat(
        [
            (model.get_parameter(n).detach() - W).flatten()
            for n, W in zip(names, before, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("form", "steps", "bound"),
    # Measured, the largest of four seeds: .0044, .0044; .028, .105.
    [("bfloat16", 1, 0.01), ("int8", 1, 0.01), ("bfloat16", 50, 0.06), ("int8", 50, 0.2)],
)
def test_training_stays_near_that_with_float32_state(form: str, steps: int, bound: float) -> None:
    for seed in range(2):
        wide, narrow = moved(None, steps, seed), moved(form, steps, seed)
        error = float((narrow - wide).norm() / wide.norm())
        assert 1e-4 < error < bound, seed


def test_eight_bits_are_too_few_for_a_factor() -> None:
    """A factor with condition number 1000: bfloat16 leaves it positive definite, codes do not."""
    generator = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    S = V @ torch.diag(torch.logspace(0, -3, 64)) @ V.mT
    S = ((S + S.mT) / 2).unsqueeze(0)

    def smallest(X: Tensor) -> float:
        return float(torch.linalg.eigvalsh(X.double())[0, 0])

    assert smallest(S) == pytest.approx(1e-3, rel=0.01)
    assert smallest(from_codes(*to_codes(S), torch.float32)) < 0
    assert all(smallest(to_bfloat16(S, turn)) > 3e-4 for turn in range(50))


# ---- what may be loaded -------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("after", [None, "bfloat16", "int8"])
def test_state_is_converted_when_the_setting_changes(before: Any, after: Any) -> None:
    model, optimizer = trained(before)
    momentum = as_float(optimizer.state[model.get_parameter(UP)])
    for group in optimizer.param_groups:
        group.update(state_dtype=after, lr=0.0, momentum=0.999)
    train(model, optimizer, range(6, 7))
    kept, fresh = optimizer.state[model.get_parameter(UP)], trained(after, 1)[0:2]
    wanted = fresh[1].state[fresh[0].get_parameter(UP)]
    assert {k: v.dtype for k, v in kept.items() if isinstance(v, Tensor)} == {
        k: v.dtype for k, v in wanted.items() if isinstance(v, Tensor)
    }
    torch.testing.assert_close(
        as_float(kept), momentum, rtol=0.05, atol=0.05 * float(momentum.max())
    )


def as_float(entries: dict[str, Any]) -> Tensor:
    momentum = entries["momentum"]
    if momentum.dtype != torch.int8:
        return momentum.float().clone()
    codes = momentum.reshape(len(entries["momentum_scales"]), -1)
    return from_codes(codes, entries["momentum_scales"], torch.float32).view_as(momentum)


@NARROW
def test_an_older_checkpoint_keeps_the_optimizers_setting(form: str) -> None:
    model, optimizer = trained(None)
    checkpoint = saved(optimizer.state_dict())
    for group in checkpoint["param_groups"]:
        group.pop("state_dtype", None)
    new = make("GoMuon", model, state_dtype=form)
    new.load_state_dict(checkpoint)
    train(model, new, range(6, 7))
    kept = new.state[model.get_parameter(UP)]
    assert kept["momentum"].dtype == getattr(torch, form)
    assert kept["left_factor"].dtype == torch.bfloat16


def narrow_checkpoint() -> tuple[MatrixOptimizer, dict[str, Any], dict[str, Any]]:
    model = mlp(20, 24, 24, 3, dtype=torch.float32)
    optimizer = Muon(model, state_dtype="int8")
    for step in range(2):
        x = torch.randn(9, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    checkpoint = saved(optimizer.state_dict())
    return optimizer, checkpoint, checkpoint["state"][0]


def damage(entries: dict[str, Any], name: str, value: float) -> None:
    entries[name].view(-1)[1] = value


DAMAGE: list[tuple[Any, str]] = [
    (lambda e: e.pop("momentum_scales"), "a momentum in 8 bits of '0.weight', but not momentum_sc"),
    (lambda e: e.pop("momentum"), "momentum_scales of '0.weight', but not its momentum"),
    (lambda e: damage(e, "momentum_scales", torch.nan), "momentum_scales of '0.weight' holds NaN"),
    (lambda e: damage(e, "momentum_scales", -1.0), "momentum_scales of '0.weight' has values from"),
    (lambda e: damage(e, "momentum", -128), "momentum of '0.weight' has values from -128"),
    (
        lambda e: e.update(momentum_scales=e["momentum_scales"][:, 1:]),
        "momentum_scales of '0.weight' has shape (1, 3) in the checkpoint; expected (1, 4)",
    ),
    (
        lambda e: e.update(momentum_scales=e["momentum_scales"].double()),
        "momentum_scales of '0.weight' is torch.float64",
    ),
    (
        lambda e: (e.update(momentum=e["momentum"].float()), e.pop("momentum_scales")),
        "momentum of '0.weight' is torch.float32 in a checkpoint of state_dtype=\"int8\"",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), DAMAGE)
def test_damaged_codes_are_refused(spoil: Any, message: str) -> None:
    optimizer, checkpoint, entries = narrow_checkpoint()
    optimizer.load_state_dict(checkpoint)
    before = copy.deepcopy(optimizer.state_dict())
    spoil(entries)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(checkpoint)
    for number, kept in optimizer.state_dict()["state"].items():
        for name, value in kept.items():
            wanted = before["state"][number][name]
            assert torch.equal(value, wanted) if isinstance(value, Tensor) else value == wanted
