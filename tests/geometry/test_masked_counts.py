"""A mask may leave a layer no row. On an accelerator that is known only after its factor."""

import pytest
import torch
from torch import nn

from gomuon import GoMuon
from gomuon.geometry import moments_to_maps


@pytest.mark.parametrize("known", [True, False], ids=["count known", "count on the device"])
def test_a_layer_without_rows_keeps_its_factors_and_has_not_failed(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(moments_to_maps, "may_have_rows", lambda moment: moment is not None)
    layer = nn.Linear(3, 4, bias=False)
    optimizer = GoMuon(layer, refresh_every=1)
    seen = []
    for kept in (1.0, 0.0, 1.0):
        optimizer.zero_grad()
        with optimizer.statistics_mask(torch.full((5, 6), kept)):
            y = layer(torch.randn(5, 6, 3))
        y.square().mean().backward()
        optimizer.step()
        state = optimizer.state[layer.weight]
        assert "failures" not in state
        seen.append(state["left_factor"].clone())
        assert state["left_seen"] == (0 if kept == 0 else optimizer.param_groups[0]["step"] - 1)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert layer.weight.isfinite().all()


def test_a_factor_that_is_not_finite_has_failed() -> None:
    """The test above can fail."""
    layer = nn.Linear(3, 4, bias=False)
    optimizer = GoMuon(layer, refresh_every=1, nonfinite="allow")
    layer(torch.full((5, 3), 1e30)).sum().backward()
    with pytest.warns(match="weight"):
        optimizer.step()
    assert optimizer.state[layer.weight]["failures"]
