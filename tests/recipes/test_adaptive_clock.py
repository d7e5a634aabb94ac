"""Clocks that adapt: intervals follow the geometry, are saved, and are those of a fixed K else."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import Adaptive, GoMuon
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.state import INTERVAL
from tests.models import language_loss, mlp, train, transformer

STILL: dict[str, Any] = {"lr": 0.0, "adamw": {"lr": 0.0}}


def intervals(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, int]:
    """The interval of every layer that has one."""
    return {
        name: optimizer.state[p][INTERVAL]
        for name, p in model.named_parameters()
        if INTERVAL in optimizer.state.get(p, {})
    }


def refreshed(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> dict[str, list[int]]:
    """The steps in which each layer was observed."""
    found: dict[str, list[int]] = {}
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        for name, p in model.named_parameters():
            if optimizer.state[p].get("left_seen") == step:
                found.setdefault(name, []).append(step)
    return found


def equal(one: nn.Module, other: nn.Module) -> bool:
    both = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in both)


# ---- the interval follows the geometry -----------------------------------------------------------


def test_with_constant_statistics_the_interval_reaches_the_longest() -> None:
    model = transformer()
    optimizer = GoMuon(model, refresh_every=Adaptive(0.9, least=1, most=16), **STILL)
    observed = []
    for step in range(50):
        optimizer.zero_grad()
        language_loss(model, 0).backward()
        optimizer.step()
        seen = {optimizer.state[p]["left_seen"] for p in optimizer.state if INTERVAL in
                optimizer.state[p]}  # fmt: skip
        assert len(seen) == 1
        observed += [step] if seen == {step} else []
    assert observed == [0, 1, 2, 4, 8, 16, 32, 48]
    assert set(intervals(model, optimizer).values()) == {16}


def rotating_rows(step: int, n: int) -> Tensor:
    """Rows whose second moment has other principal axes in every step."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(200, n, generator=generator, dtype=torch.float64)
    axes = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return rows @ (torch.logspace(0, -3, n, dtype=torch.float64)[:, None] * axes.T)


def test_with_rotating_statistics_the_interval_stays_the_shortest() -> None:
    model = mlp(8, 8, 8)
    every = Adaptive(0.9, least=2, most=16)
    optimizer = GoMuon(model, refresh_every=every, routes={"*.weight": "matrix"}, factor_decay=0.0,
                       **STILL)  # fmt: skip
    for step in range(30):
        optimizer.zero_grad()
        (model(rotating_rows(step, 8)) ** 2).mean().backward()
        optimizer.step()
        assert set(intervals(model, optimizer).values()) == {2}


def test_the_interval_falls_again_when_statistics_change() -> None:
    model = mlp(8, 8, 8)
    every = Adaptive(0.9, least=1, most=8)
    optimizer = GoMuon(model, refresh_every=every, routes={"*.weight": "matrix"}, factor_decay=0.0,
                       **STILL)  # fmt: skip
    history = []
    for step in range(48):
        optimizer.zero_grad()
        (model(rotating_rows(0 if step < 24 else step, 8)) ** 2).mean().backward()
        optimizer.step()
        history.append(intervals(model, optimizer)["0.weight"])
    assert max(history[:24]) == 8
    assert history[-1] < 4


# ---- what belongs together -----------------------------------------------------------------------


def test_layers_that_share_an_input_have_one_interval() -> None:
    model = transformer()
    optimizer = GoMuon(model, lr=0.02, refresh_every=Adaptive(0.97, least=1, most=32))
    seen = set()
    for step in range(24):
        train(model, optimizer, range(step, step + 1))
        found = intervals(model, optimizer)
        for block in range(3):
            for unit in ("attention.q attention.k attention.v attention.o", "mlp.gate mlp.up"):
                own = {found[f"trunk.blocks.{block}.{layer}.weight"] for layer in unit.split()}
                assert len(own) == 1, (block, unit)
        seen |= set(found.values())
    assert len(seen) > 2, "units differ, or nothing was tested"


def test_an_average_decays_by_the_steps_between_two_refreshes() -> None:
    model = transformer(layers=1)
    beta, every = 0.9, Adaptive(1e-9, least=1, most=8)  # every efficiency is high enough
    optimizer = GoMuon(model, refresh_every=every, factor_decay=beta, **STILL)
    name = "trunk.blocks.0.mlp.down.weight"
    state = optimizer.state[model.get_parameter(name)]

    def observation(step: int) -> Tensor:
        alone = GoMuon(model, refresh_every=1, factor_decay=0.0, **STILL)
        train(model, alone, range(step, step + 1))
        found: Tensor = alone.state[model.get_parameter(name)]["left_factor"].clone()
        alone.remove_hooks()
        return found

    train(model, optimizer, range(1))
    state = optimizer.state[model.get_parameter(name)]
    expected, before = state["left_factor"].clone(), 0
    for step in range(1, 25):
        train(model, optimizer, range(step, step + 1))
        if step in (1, 2, 4, 8, 16, 24):
            kept = beta ** (step - before)
            expected, before = kept * expected + (1 - kept) * observation(step), step
        torch.testing.assert_close(state["left_factor"], expected, rtol=1e-9, atol=1e-12)


# ---- equal to a fixed K --------------------------------------------------------------------------


@pytest.mark.parametrize("stagger", [False, True])
def test_bounds_that_are_equal_are_a_fixed_interval(stagger: bool) -> None:
    models = [transformer() for _ in range(2)]
    settings: tuple[Any, Any] = (4, Adaptive(0.9, least=4, most=4))
    for model, every in zip(models, settings, strict=True):
        optimizer = GoMuon(model, lr=0.05, refresh_every=every, stagger=stagger)
        train(model, optimizer, range(12))
    assert equal(*models)


def test_staggered_units_are_spread_over_long_intervals() -> None:
    model = transformer(layers=4)
    every = Adaptive(1e-9, least=1, most=16)
    optimizer = GoMuon(model, refresh_every=every, stagger=True, **STILL)
    found = refreshed(model, optimizer, range(64))
    last = [[step for step in steps if 48 <= step < 64] for steps in found.values()]
    assert all(len(steps) == 1 for steps in last), "each layer once in an interval"
    assert len({steps[0] for steps in last}) > 8, "and not all in one step"


def test_a_group_has_its_own_clock() -> None:
    model = transformer(layers=2)
    optimizer = GoMuon(
        model,
        refresh_every=2,
        overrides={"trunk.blocks.0.mlp.*": {"refresh_every": Adaptive(1e-9, least=1, most=8)}},
        **STILL,
    )
    found = refreshed(model, optimizer, range(16))
    assert found["trunk.blocks.1.mlp.down.weight"] == list(range(0, 16, 2))
    assert found["trunk.blocks.0.mlp.down.weight"] == [0, 1, 2, 4, 8]


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_run_continues_to_the_bit_from_a_file_of_plain_numbers() -> None:
    def make(model: nn.Module) -> GoMuon:
        return GoMuon(model, lr=0.05, refresh_every=Adaptive(0.96, least=1, most=16), stagger=True)

    straight = transformer()
    optimizer = make(straight)
    train(straight, optimizer, range(13))
    kept = copy.deepcopy(straight.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert len(set(intervals(straight, optimizer).values())) > 1
    train(straight, optimizer, range(13, 24))

    resumed = transformer(seed=1)
    resumed.load_state_dict(kept)
    second = make(resumed)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["refresh_every"] == Adaptive(0.96, least=1, most=16)
    train(resumed, second, range(13, 24))
    assert equal(straight, resumed)
    assert intervals(straight, optimizer) == intervals(resumed, second)


def test_a_checkpoint_brings_its_clock() -> None:
    model = transformer(layers=1)
    fixed = GoMuon(model, refresh_every=4)
    train(model, fixed, range(2))
    saved = fixed.state_dict()
    other = GoMuon(transformer(layers=1), refresh_every=Adaptive())
    other.load_state_dict(saved)
    assert other.param_groups[0]["refresh_every"] == 4
    saved["param_groups"][0]["refresh_every"] = {"efficiency": 2.0, "least": 1, "most": 8}
    with pytest.raises(ValueError, match=r"refresh_every must be .*Adaptive.*'efficiency': 2.0"):
        other.load_state_dict(saved)


def test_an_interval_outside_of_the_bounds_is_brought_inside() -> None:
    every = Adaptive(0.9, least=2, most=8)
    assert [every.interval(kept) for kept in (None, 0, 1, 2, 5, 8, 64)] == [2, 2, 2, 2, 5, 8, 8]
    assert every.after(5, holds=True) == 8
    assert every.after(5, holds=False) == 2
    assert every.after(None, holds=True) == 4
    assert every.after(2, holds=False) == 2


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"efficiency": 0}, r"efficiency of Adaptive must be a number in \(0, 1\], got 0"),
        ({"efficiency": "high"}, "efficiency of Adaptive .* got 'high'"),
        ({"efficiency": float("nan")}, "efficiency of Adaptive .* got nan"),
        ({"least": 0}, "least of Adaptive must be a whole number >= 1, got 0"),
        ({"most": 2.5}, "most of Adaptive must be a whole number >= 1, got 2.5"),
        ({"least": 8, "most": 4}, "got least=8 and most=4"),
    ],
)
def test_values_out_of_range_are_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Adaptive(**given)


def test_a_method_without_matched_steps_says_what_it_takes() -> None:
    from gomuon import NewtonMuon

    with pytest.raises(ValueError, match="refresh_every must be a whole number >= 1, got Adaptive"):
        NewtonMuon(transformer(layers=1), refresh_every=Adaptive())
    with pytest.raises(ValueError, match=r"refresh_every must be .* or gomuon.Adaptive"):
        GoMuon(transformer(layers=1), refresh_every="auto")  # type: ignore[arg-type]


def test_a_clock_may_be_exchanged_in_the_middle_of_a_run() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=4, **STILL)
    found = refreshed(model, optimizer, range(6))
    name = "trunk.blocks.0.mlp.down.weight"
    optimizer.param_groups[0]["refresh_every"] = Adaptive(1e-9, least=2, most=8)
    found[name] += refreshed(model, optimizer, range(6, 26))[name]
    # The hooks of step 6 were gated before the change.
    assert found[name] == [0, 4, 8, 12, 16, 24]
    optimizer.param_groups[0]["refresh_every"] = 3
    assert refreshed(model, optimizer, range(26, 33))[name] == [27, 30]


def test_it_is_printed_and_copied() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=Adaptive(0.95, least=2, most=8))
    assert "refresh_every: Adaptive(efficiency=0.95, least=2, most=8)" in repr(optimizer)
    train(model, optimizer, range(3))
    copied = copy.deepcopy((model, optimizer))
    for each, own in ((model, optimizer), copied):
        train(each, own, range(3, 9))
    assert equal(model, copied[0])
    assert intervals(model, optimizer) == intervals(*copied)


@pytest.mark.parametrize(
    "settings",
    [
        {"state_dtype": "int8"},
        {"state_dtype": "bfloat16", "input_decay": 0.9},
        {"block_size": 7},
        {"max_side": 16, "long_sides": "diagonal"},
        {"max_side": 16},
        {"alpha": (0.0, 0.25)},
        {"alpha": (0.25, 0.0), "geometry_decay": True},
        {"polar": "svd", "roots": "products"},
        {"statistics_every": 1},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_whatever_form_maps_have_they_are_compared(settings: dict[str, Any]) -> None:
    """With constant statistics; a layer without maps has nothing to compare."""
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=Adaptive(0.98, least=1, most=8), **STILL, **settings)
    for _ in range(9):
        optimizer.zero_grad()
        language_loss(model, 0).backward()
        optimizer.step()
    found = intervals(model, optimizer)
    maps = {
        name: {"left_map", "right_map"} & optimizer.state[model.get_parameter(name)].keys()
        for name in found
    }
    assert len(found) == 7
    # Siblings have one interval, also those of them that have no maps.
    assert all(interval == 8 for name, interval in found.items() if maps[name])
