"""The order and the messages of sums that leave in the backward pass."""

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.distributed import stream_layout
from gomuon.distributed.stream_layout import Bucket, buckets_of, description
from gomuon.moments import Moment, Statistics


class Block(nn.Module):
    """q and k share an input with up, which has another parent."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(8, 6), "k": nn.Linear(8, 6)})
        self.down, self.up = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.attention["q"](x), self.attention["k"](x)
        return self.head(self.down(q * k + self.up(x)))


def layout(
    bucket: int, monkeypatch: pytest.MonkeyPatch, *, forward: bool = True
) -> tuple[list[Bucket], dict[Tensor, str]]:
    monkeypatch.setattr(stream_layout, "BUCKET", bucket)
    model = Block()
    optimizer = GoMuon(model)
    if forward:
        model(torch.randn(4, 8))
    names: dict[Tensor, str] = {
        p: name.removesuffix(".weight") for name, p in model.named_parameters()
    }
    owners = {p: int(name == "up") for p, name in names.items()}
    return buckets_of(optimizer._capture, owners), names


def test_units_share_inputs_and_are_in_reverse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, names = layout(1, monkeypatch)
    units = [unit for bucket in buckets for unit in bucket.units]
    found = [[names[p] for p in unit.parameters] for unit in units]
    assert found == [["down"], ["attention.q", "attention.k", "up"]]
    assert len(buckets) == 2
    # x's sum goes once to the owner of q and k, and once to that of up.
    inputs = [(len(s.parameters), s.owner) for s in units[1].slots if s.side == "inputs"]
    assert inputs == [(2, 0), (1, 1)]
    assert {owner for owner, *_ in buckets[1].messages} == {0, 1}


def test_without_a_forward_pass_no_inputs_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = layout(1, monkeypatch)
    unseen, _ = layout(1, monkeypatch, forward=False)
    assert [len(bucket.units[0].parameters) for bucket in unseen] == [1, 1, 1, 1]
    assert description(unseen) != description(seen)


def test_small_units_share_a_bucket_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = layout(2**20, monkeypatch)
    assert [len(bucket.units) for bucket in both] == [2]
    first, second = (unit.bytes for unit in both[0].units)
    assert first == 4 * (6 * 7 // 2 + 8 * 9 // 2)
    assert len(layout(first + second, monkeypatch)[0]) == 1
    assert len(layout(first + second - 1, monkeypatch)[0]) == 2


def test_a_unit_that_shares_no_more_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, _ = layout(1, monkeypatch)
    unit = buckets[1].units[0]
    one, other = (Moment(torch.eye(8), *torch.ones(2)) for _ in range(2))
    q, k, up = unit.parameters
    shared = {p: Statistics(one, None) for p in (q, k, up)}
    assert unit.parts(shared) == [one, None, None, one, None]
    assert unit.parts({**shared, up: Statistics(other, None)}) == [one, None, None, other, None]
    assert unit.parts({**shared, k: Statistics(other, None)}) is None
    assert unit.has_data(shared)
    assert not unit.has_data({})
