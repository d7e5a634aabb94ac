"""The interface: when records come, where they go, and what is refused."""

import math
from typing import Any

import pytest
import torch

from gomuon import GoMuon, Muon
from gomuon.watching.records import WatchRecord
from tests.models import language_loss, mlp, train, transformer


def test_records_come_every_n_steps_one_for_each_layer() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    written: list[list[WatchRecord]] = []
    watch = optimizer.watch(every=3, to=written.append)
    train(model, optimizer, range(8))
    assert [{record.step for record in records} for records in written] == [{3}, {6}]
    layers = [row.name for row in optimizer.routing_table().treated("matrix")]
    assert all(sorted(r.layer for r in records) == sorted(layers) for records in written)
    assert set(watch.latest) == set(layers)
    assert [record.step for record in watch.history[layers[0]]] == [3, 6]
    assert not watch.take(), "they went to the writer"
    assert {record.covered for record in written[0]} == {3}
    assert {record.rank for record in written[0]} == {0}


def test_without_a_writer_records_wait() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    with optimizer.watch(every=2) as watch:
        train(model, optimizer, range(4))
        assert {record.step for record in watch} == {2, 4}
        assert not list(watch)
    train(model, optimizer, range(4, 8))
    assert not list(watch), "it was removed"
    watch.remove()  # once more does no harm


def test_several_writers() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    one: list[WatchRecord] = []
    two: list[WatchRecord] = []
    optimizer.watch(every=1, to=(one.extend, two.extend))
    train(model, optimizer, range(1))
    assert one
    assert one == two


@pytest.mark.parametrize("name", ["every", "spectra"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "10"])
def test_numbers_that_are_no_intervals_are_refused(name: str, value: Any) -> None:
    optimizer = Muon(mlp(4, 4, 2))
    with pytest.raises(ValueError, match=f"{name} must be a whole number >= 1, got"):
        optimizer.watch(**{name: value})
    assert not optimizer._step.observers


@pytest.mark.parametrize("to", ["run.jsonl", [print, 3], 7])
def test_what_cannot_be_called_is_refused(to: Any) -> None:
    with pytest.raises(TypeError, match="to must be a function of a list of records"):
        Muon(mlp(4, 4, 2)).watch(to=to)


def test_layers_take_turns_with_their_spectra() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    watch = optimizer.watch(every=2, spectra=3)
    train(model, optimizer, range(12))
    measured: dict[str, list[int]] = {}
    for record in watch:
        if record.oracle_value is not None:
            assert record.measured is not None
            assert record.step - 2 < record.measured <= record.step
            measured.setdefault(record.layer, []).append(record.step)
    assert len(measured) == 7
    assert all(later - first == 6 for first, later in measured.values())
    assert len({first for first, _ in measured.values()}) == 3


def test_spectra_are_measured_at_a_refresh_if_there_is_one() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, refresh_every=4)
    watch = optimizer.watch(every=3, spectra=1)
    train(model, optimizer, range(12))
    steps = {(record.step, record.measured, record.age) for record in watch}
    assert steps == {(3, 1, 2), (6, 5, 1), (9, 9, 0), (12, 12, 3)}
    drifts = {record.step for record in watch.history[next(iter(watch.history))] if record.drift}
    assert drifts == {6, 9}, "the first refresh has nothing to be compared with"


def test_a_skipped_step_is_no_step() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, nonfinite="skip")
    watch = optimizer.watch(every=2, spectra=1)
    train(model, optimizer, range(1))
    language_loss(model, 1).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(math.nan)
    with pytest.warns(match="skipped"):
        optimizer.step()
    assert not list(watch)
    train(model, optimizer, range(2, 3))
    records = list(watch)
    assert {(record.step, record.covered, record.skipped) for record in records} == {(2, 2, 1)}


def test_nothing_is_raised_for_numbers_that_are_not_finite() -> None:
    model = mlp(4, 4, 4, 2, dtype=torch.float32)
    optimizer = Muon(model, nonfinite="allow")
    watch = optimizer.watch(every=1, spectra=1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    records = list(watch)
    assert records
    assert all(record.source_alignment is None for record in records)
    assert all(record.oracle_value is None for record in records)


def test_negatives_are_counted_over_all_steps_since_the_last_record() -> None:
    model = mlp(4, 4, 4, 2)
    optimizer = Muon(model, lr=0.0)
    watch = optimizer.watch(every=4)
    x = torch.randn(9, 4, dtype=torch.float64)
    for sign in (1.0, 1.0, -0.01, 1.0, 1.0, 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        (sign * model(x).square().sum()).backward()
        optimizer.step()
    counts = [(r.step, r.source_negatives, r.gradient_negatives) for r in watch]
    assert sorted(counts) == [(4, 0, 1), (4, 0, 1), (8, 0, 0), (8, 0, 0)]


def test_a_watch_may_begin_later_and_layers_may_come_and_go() -> None:
    model = transformer(layers=2)
    optimizer = GoMuon(model, refresh_every=4)
    train(model, optimizer, range(6))
    watch = optimizer.watch(every=2)
    train(model, optimizer, range(6, 8))
    assert {record.age for record in watch} == {None}, "no refresh was seen yet"
    frozen = model.trunk.blocks[0].get_submodule("mlp.up").get_parameter("weight")
    for step in range(8, 12):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        if step == 10:
            frozen.grad = None
        optimizer.step()
    records = {(r.step, r.layer): r for r in watch}
    layers = {layer for _, layer in records}
    assert len([1 for step, _ in records if step == 12]) == len(layers)
    covered = {layer: records[12, layer].covered for layer in layers}
    assert sorted(set(covered.values())) == [1, 2]
    assert [layer for layer, updates in covered.items() if updates == 1] == [
        "trunk.blocks.0.mlp.up.weight"
    ]


def test_observers_are_handed_documented_updates() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = {}

    def look(layer: Any) -> None:
        seen[layer.layer] = (layer, layer.update.clone())

    stop = optimizer.add_observer(look)
    train(model, optimizer, range(1, 2))
    stop()
    train(model, optimizer, range(2, 3))
    assert len(seen) == 7
    moved = dict(model.named_parameters())
    for name, (layer, update) in seen.items():
        assert layer.parameter is moved[name]
        assert layer.gradient.shape == layer.source.shape == layer.direction.shape
        assert layer.left_map.shape[-1] == layer.source.shape[-2]
        assert update.shape[1:] == before[name].shape
