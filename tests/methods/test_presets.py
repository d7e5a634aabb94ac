"""Presets: settings that belong together, replaced by settings that are also given."""

import inspect
from typing import get_type_hints

import pytest
import torch
from torch import nn

from gomuon import GoMuon, Muon
from gomuon.methods.go_muon import PRESETS, GoMuonSettings
from gomuon.optimizer import Common
from gomuon.recipes.registry import METHODS
from gomuon.settings import check_settings
from tests.models import train, transformer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_leaves_the_rest(name: str) -> None:
    group = GoMuon(model(), preset=name).param_groups[0]  # type: ignore[arg-type]
    expected = {**GoMuon.recipe.defaults, **PRESETS[name]}
    assert {key: group[key] for key in expected} == expected
    check_settings(PRESETS[name], GoMuon.recipe.settings)


EVERY_PRESET = [(name, one) for name, m in METHODS.items() for one in m.recipe.presets]


@pytest.mark.parametrize(("method", "name"), EVERY_PRESET)
def test_every_preset_is_of_its_method_and_sets_its_rate(method: str, name: str) -> None:
    recipe = METHODS[method].recipe
    check_settings(recipe.presets[name], recipe.settings)
    assert recipe.presets[name].keys() <= recipe.settings.keys()
    group = METHODS[method](model(), preset=name).param_groups[0]
    expected = {**recipe.defaults, **recipe.presets[name]}
    assert {key: group[key] for key in expected} == expected
    assert METHODS[method](model(), 0.5, preset=name).param_groups[0]["lr"] == 0.5


def test_what_is_given_replaces_the_preset() -> None:
    given = GoMuon(model(), preset="fast", refresh_every=4, lr=0.5).param_groups[0]
    assert given["refresh_every"] == GoMuon.recipe.defaults["refresh_every"] == 4
    assert PRESETS["fast"]["refresh_every"] != 4
    assert (given["rows"], given["lr"]) == (PRESETS["fast"]["rows"], 0.5)


@pytest.mark.parametrize(("wrong", "said"), [("quick", "'quick'"), (4, "4"), (["fast"], "fast")])
def test_an_unknown_preset_is_refused_by_name(wrong: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"GoMuon has no preset .*{said}.*it has 'fast', 'paper'"):
        GoMuon(model(), preset=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Muon has no preset 'fast'; it has none"):
        Muon(model(), preset="fast")


def test_the_paper_s_preset_is_the_paper_s_arithmetic() -> None:
    """No side of the paper's models is cut, so only the polar factor differs from the default."""
    net, twin = (transformer(layers=1, dtype=torch.float32) for _ in range(2))
    train(net, GoMuon(net, preset="paper"), range(6))
    train(twin, GoMuon(twin, polar="svd"), range(6))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_type_checkers_and_people_see_the_recipe_s_settings() -> None:
    known = set(get_type_hints(GoMuonSettings)) - set(get_type_hints(Common))
    assert known == {*GoMuon.recipe.settings, "preset"} - {"lr"}
    shown = inspect.signature(GoMuon).parameters
    assert known <= set(shown)
    assert {name: shown[name].default for name in GoMuon.recipe.defaults} == GoMuon.recipe.defaults
    assert "preset" not in inspect.signature(Muon).parameters
