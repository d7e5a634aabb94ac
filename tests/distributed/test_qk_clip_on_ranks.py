"""QK-clip on several ranks: one clip for all, by the largest logits of any rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gomuon import GoMuon, QKClip
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import (
    Weights,
    assert_alike,
    distance,
    language_loss,
    train,
    weights,
    wrapped,
)
from tests.models import tokens, transformer

THRESHOLD = 0.02


def trained(place: Place | None, *, late: bool = False, threshold: float = THRESHOLD) -> Weights:
    """Under DDP on the ranks of a place, or alone on the union batch."""
    model = transformer(layers=2)
    outer = model if place is None or late else wrapped(model, "ddp")
    optimizer = GoMuon(outer, stagger=True, lr=0.02)
    QKClip(optimizer, outer, threshold)
    if late and place is not None:
        outer = wrapped(model, "ddp")
    train(outer, optimizer, range(6), place)
    return weights(outer)


@pytest.mark.parametrize("late", [False, True], ids=["wrapped before", "wrapped later"])
def test_ranks_clip_alike_and_as_one_process_with_the_union_batch(
    late: bool, tmp_path: Path
) -> None:
    answers = launch(2, trained, tmp_path, late=late)
    assert_alike(answers)
    assert distance(answers[0], trained(None)) < 1e-9
    assert distance(answers[0], trained(None, threshold=1e9)) > 1e-3  # it did clip


def averaged_by_hand(place: Place, says: str) -> Weights:
    """Ranks are known by the optimizer's `work`, or by the process group that the clip is given."""
    model = transformer(layers=1)
    optimizer = (
        GoMuon(model, lr=0.02, work="shared")
        if says == "work"
        else SGD(model.parameters(), lr=0.01)
    )
    QKClip(optimizer, model, THRESHOLD, process_group=dist.group.WORLD if says == "group" else None)
    for step in range(3):
        optimizer.zero_grad()
        window = tokens(step, 2)[place.rank : place.rank + 1]
        language_loss(model, window, 20, 2).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(2)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("says", ["work", "group"])
def test_ranks_whose_gradients_you_average_clip_alike(says: str, tmp_path: Path) -> None:
    assert_alike(launch(2, averaged_by_hand, tmp_path, says=says))


def test_ranks_that_are_not_known_to_work_together_clip_alone(tmp_path: Path) -> None:
    one, other = launch(2, averaged_by_hand, tmp_path, says="nothing")
    assert distance(one, other) > 1e-3


class Sometimes(nn.Module):
    """Some ranks run the second attention as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        q1, k1, q2, k2 = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in self.layers)
        out = F.scaled_dot_product_attention(q1, k1, q1)
        return out + F.scaled_dot_product_attention(q2, k2, q2) if second else out


def partly(place: Place) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Sometimes().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(optimizer, model, 0.01)
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model((place.rank + 1) * x, second=place.rank == 1).square().mean().backward()
    optimizer.step()
    found = clip.largest_logits()
    assert sorted(found) == ["layers.0.weight", "layers.2.weight"]
    return (
        torch.cat([found[name] for name in sorted(found)]).tolist(),
        torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    )


def test_an_attention_that_ran_on_one_rank_is_clipped_on_all(tmp_path: Path) -> None:
    one, other = launch(2, partly, tmp_path)
    assert one == other
    assert min(one[0]) > 0.01


def sharded(place: Place) -> str:
    model = wrapped(transformer(layers=1), "fsdp")
    optimizer = GoMuon(model)
    with pytest.raises(ValueError, match="QKClip cannot rescale sharded parameters") as raised:
        QKClip(optimizer, model)
    return str(raised.value)


def test_sharded_parameters_are_an_error(tmp_path: Path) -> None:
    one, other = launch(2, sharded, tmp_path)
    assert one == other
    assert "'embedding.weight' is one" in one
