"""Factors, and maps if asked, that live on the host: what moves when, and that nothing changes."""

from collections import Counter
from typing import Any

import pytest
import torch

from gomuon.parameters.keeping import Keeping
from gomuon.recipes.registry import METHODS
from tests.accelerator import printed_by
from tests.methods.table import assert_equal, make, saved
from tests.models import train, transformer
from tests.offloaded import SETTINGS

OFFLOADING = [name for name, kind in METHODS.items() if "offload" in kind.recipe.settings]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The copies of every step, in a process of its own: torch cannot forget a device."""
    found: dict[str, Any] = printed_by("tests.offloaded")["found"]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_factors_move_once_each_way_on_refresh_steps_only(found: Any, name: str) -> None:
    """Four factors. No copy waits, and a step waits as often as without."""
    steps = found[f"{name} True"]["steps"]
    copies = [Counter(step["copies"]) for step in steps]
    there_and_back = {"to device": 4, "to host": 4}
    assert copies == [{"to host": 4}, {}, there_and_back, {}, there_and_back, {}]
    without = found[f"{name} False"]["steps"]
    assert not any(step["copies"] for step in without)
    assert [step["waits"] for step in steps] == [step["waits"] for step in without]
    places = found[f"{name} True"]["places"]
    assert {key for key, place in places.items() if place == "cpu"} == {
        "left_factor",
        "right_factor",
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_maps_come_in_every_step_if_asked(found: Any, name: str) -> None:
    steps = found[f"{name} maps"]["steps"]
    copies = [Counter(step["copies"]) for step in steps[2:]]
    refresh, reuse = {"to device": 4 + 4, "to host": 4 + 4}, {"to device": 4}
    assert copies == [refresh, reuse, refresh, reuse]
    assert found[f"{name} maps"]["places"]["left_map"] == "cpu"


@pytest.mark.parametrize("name", OFFLOADING)
def test_on_the_cpu_it_changes_nothing(name: str) -> None:
    models = [transformer(dtype=torch.float32, layers=1) for _ in range(2)]
    optimizers = [
        make(name, model, offload=offload)
        for model, offload in zip(models, (False, "maps"), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(6))
    assert_equal(*models)
    one, other = ([[*entries] for entries in o.state.values()] for o in optimizers)
    assert one == other


@pytest.mark.parametrize("offload", [True, "maps"])
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_steps_are_the_same(
    name: str, form: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of an accelerator, with real numbers: bit for bit, also after loading."""
    model, twin = (transformer(dtype=torch.float32, layers=1) for _ in range(2))
    clock = {"refresh_every": 3}
    optimizer = make(name, model, state_dtype=form, **clock)
    train(model, optimizer, range(8))
    monkeypatch.setattr(
        Keeping, "of", lambda group, device, wide: Keeping(group["state_dtype"], offload, wide)
    )
    other = make(name, twin, state_dtype=form, offload=offload, **clock)
    train(twin, other, range(4))
    state = saved(other.state_dict())
    other = make(name, twin, state_dtype=form, offload=offload, **clock)
    other.load_state_dict(state)
    train(twin, other, range(4, 8))
    assert_equal(model, twin)
