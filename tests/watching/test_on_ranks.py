"""On several ranks each one records the layers that it computes, or all get all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon import GoMuon
from gomuon.watching.records import WatchRecord
from tests.distributed.launcher import Place, launch
from tests.distributed.test_tensor_parallel import Net, divided
from tests.distributed.test_tensor_parallel import train as train_blocks
from tests.distributed.worlds import assert_alike, train, weights, wrapped
from tests.models import transformer

STEPS = 7


def watched(place: Place, kind: str, gather: bool, settings: dict[str, Any]) -> Any:
    """The weights with and without a watch, this rank's records, and who owns what."""
    found = []
    for is_watched in (False, True):
        model = wrapped(transformer(layers=1), kind)
        optimizer = GoMuon(model, refresh_every=2, **settings)
        records: list[WatchRecord] = []
        if is_watched:
            optimizer.watch(every=3, to=records.extend, spectra=1, gather=gather)
        train(model, optimizer, range(STEPS), place)
        found.append(weights(model))
    names = {name.removeprefix("module."): rank for name, rank in optimizer.owners().items()}
    return found, [record.as_dict() for record in records], names


def all_records(answers: list[Any]) -> list[list[WatchRecord]]:
    return [[WatchRecord.from_dict(entries) for entries in mine] for _, mine, _ in answers]


@pytest.mark.parametrize("gather", [False, True])
def test_owners_under_ddp(tmp_path: Path, gather: bool) -> None:
    answers = launch(2, watched, tmp_path, kind="ddp", gather=gather, settings={})
    assert_alike([w for (both, _, _) in answers for w in both])
    owners = answers[0][2]
    assert set(owners.values()) == {0, 1}
    for rank, records in enumerate(all_records(answers)):
        assert {record.step for record in records} == {3, 6}
        expected = {name: owner for name, owner in owners.items() if gather or owner == rank}
        assert {r.layer.removeprefix("module."): r.rank for r in records} == expected
        assert len(records) == 2 * len(expected)
        assert all(r.weight_norm is not None and r.oracle_value is not None for r in records)


def test_sharded_weights_are_not_gathered_for_a_record(tmp_path: Path) -> None:
    answers = launch(2, watched, tmp_path, kind="fsdp", gather=True, settings={})
    assert_alike([w for (both, _, _) in answers for w in both])
    records = all_records(answers)[0]
    assert len(records) == 14
    assert all(r.weight_norm is r.update_ratio is r.weight_rank is None for r in records)
    assert all(r.oracle_value is not None for r in records)


def test_replicated_ranks_record_everything(tmp_path: Path) -> None:
    settings = {"work": "replicated"}
    answers = launch(2, watched, tmp_path, kind="ddp", gather=True, settings=settings)
    assert_alike([w for (both, _, _) in answers for w in both])
    for rank, records in enumerate(all_records(answers)):
        assert len(records) == 14
        assert {record.rank for record in records} == {rank}


def blocks(place: Place) -> Any:
    """The records of all ranks where each has blocks of the layers."""
    model = divided(Net())
    optimizer = GoMuon(model, refresh_every=2)
    watch = optimizer.watch(every=2, spectra=1, gather=True)
    train_blocks(model, optimizer, range(4))
    return [record.as_dict() for record in watch]


def test_blocks_under_tensor_parallelism(tmp_path: Path) -> None:
    one, other = launch(2, blocks, tmp_path)
    assert one == other
    last = {(r["layer"], r["rank"]): r for r in one if r["step"] == 4}
    assert {rank for _, rank in last} == {0, 1}
    gate = last["gate.weight", 0], last["gate.weight", 1]
    assert [(r["rows"], r["columns"]) for r in gate] == [(6, 8), (6, 8)]
    assert gate[0]["source_alignment"] != gate[1]["source_alignment"]


def test_records_of_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    answers = launch(2, watched, tmp_path, kind="ddp", gather=True, settings={"stagger": False})
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=2, stagger=False)
    alone: list[WatchRecord] = []
    optimizer.watch(every=3, to=alone.extend, spectra=1)
    train(model, optimizer, range(STEPS))
    found = {(r.step, r.layer.removeprefix("module.")): r for r in all_records(answers)[0]}
    assert len(found) == len(alone)
    for record in alone:
        other = found[record.step, record.layer]
        assert other.measured == record.measured
        for name in ("source_alignment", "oracle_value", "drift", "efficiency", "output_share"):
            one, two = getattr(record, name), getattr(other, name)
            if one is None:
                assert two is None
            else:
                assert torch.isclose(torch.tensor(one), torch.tensor(two), rtol=1e-3), name
