"""Checkpoints whose sides are cut in another way: converted, or loaded with their own settings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import KFAC, GoMuon, LayerSpec
from gomuon.functional.block_diagonal import diagonal_blocks
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.side_forms import LONG_SIDES
from gomuon.recipes.registry import METHODS
from tests.methods.table import assert_equal, saved
from tests.models import train, transformer

CAPTURING = [name for name, kind in METHODS.items() if kind.recipe.geometry.uses_moments]
LAYER = "trunk.blocks.0.attention.q.weight"  # 16 × 16


def older(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As a version without these settings wrote it."""
    checkpoint: dict[str, Any] = saved(state_dict)
    for group in checkpoint["param_groups"]:
        for name in LONG_SIDES:
            del group[name]
    return checkpoint


def whole_checkpoint(method: str, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = transformer(layers=1)
    optimizer = METHODS[method](model, refresh_every=4, block_size=None, **settings)
    train(model, optimizer, range(5))  # the next step reuses the geometry
    return model, older(optimizer.state_dict())


def entries(checkpoint: dict[str, Any], optimizer: MatrixOptimizer) -> dict[str, Any]:
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    found: dict[str, Any] = checkpoint["state"][names.index(LAYER)]
    return found


@pytest.mark.parametrize("method", CAPTURING)
def test_whole_factors_of_an_older_version_become_their_blocks(method: str) -> None:
    settings: dict[str, Any] = {"statistics_every": 4} if method == "KFAC" else {}
    model, checkpoint = whole_checkpoint(method, **settings)
    optimizer = METHODS[method](model, refresh_every=4, block_size=7, **settings)
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["block_size"] == 7
    old = entries(checkpoint, optimizer)
    train(model, optimizer, range(5, 6))
    new = optimizer.state[model.get_parameter(LAYER)]
    for key in ("left_factor", "right_factor", "left_map", "right_map"):
        if key in old:
            torch.testing.assert_close(new[key], diagonal_blocks(old[key], 4), msg=key)
    assert method != "KFAC" or "left_basis" not in new, "made again at the next refresh"
    train(model, optimizer, range(6, 10))
    kind = "left_basis" if method == "KFAC" else "right_map"
    assert new[kind].shape == (1, 4, 4, 4)
    assert all(p.isfinite().all() for p in model.parameters())


def test_without_cuts_an_older_checkpoint_goes_on_bit_for_bit() -> None:
    model, checkpoint = whole_checkpoint("GoMuon")
    twin = transformer(layers=1)
    twin.load_state_dict(model.state_dict())
    for net, size in ((model, None), (twin, 1024)):
        optimizer = GoMuon(net, refresh_every=4, block_size=size)
        optimizer.load_state_dict(checkpoint)
        train(net, optimizer, range(5, 11))
    assert_equal(model, twin)


def test_a_shared_factor_stays_shared_when_it_is_cut() -> None:
    model, checkpoint = whole_checkpoint("GoMuon", input_decay=0.9)
    optimizer = GoMuon(model, refresh_every=4, input_decay=0.9, block_size=7)
    optimizer.load_state_dict(checkpoint)
    train(model, optimizer, range(5, 6))
    q, k, v = (
        optimizer.state[model.get_parameter(LAYER.replace(".q.", f".{name}."))]["right_factor"]
        for name in "qkv"
    )
    assert q is k is v
    assert q.shape == (1, 4, 4, 4)


def test_a_checkpoint_brings_its_own_block_size() -> None:
    model, twin = transformer(layers=1), transformer(layers=1)
    optimizer, other = GoMuon(model, block_size=7), GoMuon(twin)
    train(model, optimizer, range(6))
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved(optimizer.state_dict()))
    assert other.param_groups[0]["block_size"] == 7
    train(model, optimizer, range(6, 12))
    train(twin, other, range(6, 12))
    assert_equal(model, twin)


CHANGES: list[tuple[LayerSpec, LayerSpec, tuple[int, ...] | None]] = [
    (LayerSpec(inputs=4), LayerSpec(), (1, 16, 16)),
    (LayerSpec(inputs=4), LayerSpec(inputs=5), (1, 4, 4, 4)),
    (LayerSpec(inputs=4), LayerSpec(inputs=8), (1, 2, 8, 8)),
    (LayerSpec(inputs=8), LayerSpec(inputs=4), (1, 4, 4, 4)),
    (LayerSpec(inputs=8), LayerSpec(inputs="diagonal"), (1, 1, 16)),
    (LayerSpec(inputs="diagonal"), LayerSpec(inputs=8), (1, 2, 8, 8)),
    (LayerSpec(inputs="diagonal"), LayerSpec(), (1, 16, 16)),
    (LayerSpec(inputs=8), LayerSpec(inputs="identity"), None),
    (LayerSpec(inputs="identity"), LayerSpec(inputs=8), None),
]


@pytest.mark.parametrize(("before", "after", "shape"), CHANGES)
def test_maps_and_factors_of_other_specs_are_cut_again(
    before: LayerSpec, after: LayerSpec, shape: tuple[int, ...] | None
) -> None:
    model = transformer(layers=1)
    first = GoMuon(model, specs={LAYER: before}, input_decay=0.9)
    train(model, first, range(5))
    checkpoint = saved(first.state_dict())
    second = GoMuon(model, specs={LAYER: after}, input_decay=0.9)
    second.load_state_dict(checkpoint)
    train(model, second, range(5, 6))
    state = second.state[model.get_parameter(LAYER)]
    for key in ("right_factor", "right_map"):
        assert (tuple(state[key].shape) if key in state else None) == shape
        if shape is not None:
            old = explicit(entries(checkpoint, second)[key])
            new = explicit(state[key])
            assert torch.equal(new[new != 0], old[new != 0])  # what lies outside is dropped
            assert torch.linalg.eigvalsh(new).min() > 0
    train(model, second, range(6, 10))
    assert all(p.isfinite().all() for p in model.parameters())


def explicit(S: Tensor) -> Tensor:
    """The 16 × 16 matrix that S stands for."""
    if S.ndim == 4:
        return torch.block_diag(*S[0])
    return S[0] if S.shape[-1] == S.shape[-2] else torch.diag(S.flatten())


@pytest.mark.parametrize(
    ("specs", "key", "change", "message"),
    [
        (LayerSpec(inputs=8), "right_factor", lambda S: -S, "is not positive semidefinite"),
        (LayerSpec(inputs="diagonal"), "right_factor", lambda S: -S, "is negative"),
        (LayerSpec(inputs=8), "right_map", lambda S: S[:, :1], "has shape (1, 1, 8, 8)"),
        (LayerSpec(inputs=8), "right_map", lambda S: S[..., :-1], "has shape (1, 2, 8, 7)"),
        (
            LayerSpec(inputs=8),
            "right_map",
            lambda S: S.repeat(1, 2, 1, 1),
            "is for matrices with a side of 32 in the checkpoint, but here that side is 16",
        ),
    ],
)
def test_what_is_no_cut_of_the_side_is_refused(
    specs: LayerSpec, key: str, change: Any, message: str
) -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, specs={LAYER: specs}, input_decay=0.9)
    train(model, optimizer, range(2))
    checkpoint = saved(optimizer.state_dict())
    kept = entries(checkpoint, optimizer)
    kept[key] = change(kept[key])
    with pytest.raises(ValueError, match=f"{key} of .*attention.q.weight") as refusal:
        optimizer.load_state_dict(checkpoint)
    assert message in str(refusal.value)


def test_eigenvalues_of_a_cut_side_have_its_shape() -> None:
    model = transformer(layers=1)
    optimizer = KFAC(model, specs={LAYER: LayerSpec(inputs=5)})
    train(model, optimizer, range(2))
    checkpoint = saved(optimizer.state_dict())
    values = entries(checkpoint, optimizer)["right_values"]
    assert values.shape == (1, 4, 4)
    entries(checkpoint, optimizer)["right_values"] = values[..., :-1]
    with pytest.raises(ValueError, match=r"right_values of .* is for matrices with a side of 12"):
        optimizer.load_state_dict(checkpoint)
