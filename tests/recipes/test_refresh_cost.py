"""A warning before a refresh that takes far longer than the training it serves."""

import warnings

import pytest
import torch
from torch import nn

from gomuon import FISMO, KFAC, SOAP, GoMuon, Muon, Shampoo
from gomuon.errors import GeometryWarning
from gomuon.moments import Moment, Statistics
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.specs import LayerSpec
from gomuon.recipes import refresh_cost
from gomuon.recipes.refresh_cost import costly_refresh

ROWS = 6000  # so that eight roots of side 512 are many passes, and one is few


def moment(side: int, rows: int) -> Moment:
    count = torch.tensor(float(rows), dtype=torch.float64)
    return Moment(torch.zeros(()).expand(side, side), count, count)


def layer(m: int, n: int, rows: int, name: str = "fc.weight") -> Layer:
    """A layer with sums of its whole sides, which take no memory."""
    spec = LayerSpec(outputs="whole", inputs="whole")
    made = Layer(name, torch.zeros(()).expand(m, n), {}, spec)
    made.statistics = Statistics(moment(n, rows), moment(m, rows))
    return made


def message(*layers: Layer) -> str | None:
    return costly_refresh(layers, GoMuon.recipe.work, GoMuon.recipe.defaults)


def test_a_resnets_longest_sides_are_named() -> None:
    # torchvision's ResNet-18 at 32×32, batch 32: 512 × 512·3·3, 32 rows of its last layers.
    found = message(layer(512, 4608, 32, "layer4.weight"), layer(64, 576, 32 * 64, "layer1.weight"))
    assert found is not None
    assert "most of it is for 'layer4.weight' (4608 inputs), 'layer1.weight' (576 inputs)" in found
    assert "block_size=256" in found


@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        pytest.param(64, 64, 1, id="over in a moment"),
        pytest.param(2048, 2048, 500_000, id="many rows"),
    ],
)
def test_nothing_is_said(m: int, n: int, rows: int) -> None:
    assert message(layer(m, n, rows)) is None


def test_a_factor_that_layers_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh_cost, "NOTICEABLE", 0.0)
    alone, together = (
        [layer(8, 512, ROWS) for _ in range(8)],
        [layer(8, 512, ROWS) for _ in range(8)],
    )
    shared = together[0].statistics
    assert shared is not None
    for one in together:
        assert one.statistics is not None
        one.statistics = Statistics(shared.inputs, one.statistics.gradients)
    assert message(*alone) is not None
    assert message(*together) is None


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        (SOAP, ["max_side=", "refresh_every="]),
        (Shampoo, ["block_size=256", "refresh_every="]),
        (FISMO, []),
    ],
)
def test_maps_of_gradients_are_counted_without_rows(
    method: type[MatrixOptimizer], ways: list[str]
) -> None:
    def found(m: int, n: int) -> str | None:
        layers = [Layer("head.up", torch.zeros(()).expand(m, n), {}, LayerSpec())]
        return costly_refresh(layers, method.recipe.work, method.recipe.defaults)

    long = found(4000, 3000)
    assert long is not None
    assert "with 4,096 rows" in long
    assert "'head.up' (4000 outputs, 3000 inputs)" in long
    named = [way for way in ("block_size=256", "max_side=", "refresh_every=") if way in long]
    assert named == ways
    assert found(256, 256) is None
    assert costly_refresh([], Muon.recipe.work, Muon.recipe.defaults) is None


def test_the_user_is_warned_once_and_before_the_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh_cost, "NOTICEABLE", 0.0)

    def warned(method: type, **settings: object) -> list[str]:
        model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 2))
        optimizer = method(model, **settings)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", GeometryWarning)
            for _ in range(2):
                model(torch.randn(4, 96)).square().mean().backward()
                optimizer.step()
        return [str(one.message) for one in found if "a refresh takes about" in str(one.message)]

    assert len(warned(GoMuon, refresh_every=1, stagger=True)) == 1
    assert len(warned(KFAC, refresh_every=1)) == 1
    monkeypatch.setattr(refresh_cost, "ASSUMED_ROWS", 1)
    assert len(warned(SOAP, refresh_every=1)) == 1
    assert not warned(GoMuon, block_size=4)
    assert not warned(Muon)
