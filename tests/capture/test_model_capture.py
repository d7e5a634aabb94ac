"""The capture of a model on its own, without an optimizer: placed, gated, read, removed."""

from typing import Any

import torch
from torch import nn

from gomuon.capture.group import GroupCapture
from gomuon.capture.model import ModelCapture
from gomuon.parameters.layout import Layout
from tests.models import mlp


def captured(model: nn.Module, due: list[bool], **settings: Any) -> tuple[ModelCapture, Any]:
    """A capture of all weights of a model, which observes if `due[0]`."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    sampling = {"rows": None, "token_stride": 1, "token_skip": 0, "reduce": False}
    group = {"params": weights, "treatment": "matrix", "stagger": False, **sampling, **settings}
    capture = ModelCapture(Layout(), lambda group: (True, True), lambda group, phase: due[0])
    capture.groups.append(GroupCapture())
    capture.attach(model, [group])
    return capture, group


def test_it_collects_once_for_each_row_and_nothing_while_closed() -> None:
    model, due = mlp(3, 4, 2), [True]
    capture, group = captured(model, due)
    x = torch.randn(5, 3, dtype=torch.float64)
    model(x).sum().backward()
    statistics = capture.collect(ranks=1)[0][model.get_parameter("0.weight")]
    assert statistics.inputs is not None
    torch.testing.assert_close(statistics.inputs.total, x.T @ x)
    assert float(statistics.inputs.count) == 5
    assert capture.shapes(0)[model.get_parameter("0.weight")] == ((3, 3), (4, 4), None, 1)

    due[0] = False
    assert capture.gate([group]) == []
    model(x).sum().backward()
    assert capture.collect(ranks=1) == {}
    assert not capture.is_open


def test_changed_settings_place_the_hooks_again_and_removal_leaves_none() -> None:
    model, due = mlp(3, 4, 4, 2), [True]
    capture, group = captured(model, due, refresh_every=4)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    assert hooks == 3
    group["stagger"] = True
    assert capture.gate([group]) == [0]
    group["rows"] = 2
    assert capture.gate([group]) == [0]
    assert capture.gate([group]) == []
    assert len(set(capture._layout.phases.values())) == 3
    capture.remove()
    assert not any(module._forward_hooks for module in model.modules())
    assert capture.model is None
