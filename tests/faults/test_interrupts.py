"""A few of the campaign's cases, and interruptions no dispatch mode can make."""

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Muon
from gomuon.functional import polar
from gomuon.optimizer import MatrixOptimizer
from gomuon.watching.layer_updates import HandedUpdates, LayerUpdate
from tests.faults.campaign import module_of
from tests.faults.interrupts import KINDS, interrupted, operations, places, quiet
from tests.models import language_loss, train, transformer


@pytest.mark.parametrize("part", [1, 4, 7])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_next_step_does_not_notice(number: int, part: int) -> None:
    """Every kind of step, at its beginning, in its middle and near its end."""
    with quiet():
        assert interrupted(KINDS[number], part * operations(number) // 8) is None


def test_the_whole_campaign_comes_to_every_operation() -> None:
    with quiet():
        assert len(places()) <= module_of("interrupts")[1]


def lone() -> tuple[nn.Linear, Muon]:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(layer.weight)
    return layer, Muon(layer, lr=0.1, momentum=0.0, nesterov=False)


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["observer", "direction"])
def test_a_failed_steps_gradients_move_nothing_later(
    stopped_by: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, optimizer = lone()

    def stop(*anything: object) -> Tensor:
        raise stopped_by("stopped")

    layer.weight.grad = -torch.eye(4)
    with monkeypatch.context() as patched:
        if where == "observer":
            patched.setattr(optimizer._step, "observers", [HandedUpdates(stop)])
        else:
            patched.setattr("gomuon.recipes.stations.polar", stop)
        with pytest.raises(stopped_by):
            optimizer.step()
    before = layer.weight.detach().clone()
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    layer.weight.grad = gradient
    optimizer.step()
    moved = layer.weight.detach() - before
    torch.testing.assert_close(moved, -0.1 * polar(gradient, "fast"))


def test_an_interrupted_step_is_not_counted() -> None:
    """The clock stands still, so a refresh that was interrupted is made up for."""
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(4))

    def stop(layer: LayerUpdate) -> None:
        raise KeyboardInterrupt

    remove = optimizer.add_observer(stop)
    optimizer.zero_grad()
    language_loss(model, 4).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    remove()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    assert refreshes(optimizer)
    train(model, optimizer, range(4, 5))
    assert not refreshes(optimizer)


def refreshes(optimizer: MatrixOptimizer) -> bool:
    return any(capture.shared.open for capture in optimizer._capture.groups)
