"""Watching does not change a trajectory by one bit, and once removed not by one operation."""

from typing import Any

import pytest
import torch
from torch import nn

from gomuon import GoMuon, LayerSpec, Muon
from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.watching.records import WatchRecord
from tests.methods.table import CUT_RECIPES, RECIPES, assert_equal, make, saved
from tests.models import train, transformer

STEPS = 11
HEADS = LayerSpec(heads=2)
CASES: list[tuple[str, dict[str, Any]]] = [
    *RECIPES,
    *CUT_RECIPES,
    ("GoMuon", {"preset": "fast"}),
    ("GoMuon", {"preset": "paper"}),
    ("GoMuon", {"state_dtype": "bfloat16"}),
    ("GoMuon", {"state_dtype": "int8", "roots": "products"}),
    ("GoMuon", {"stagger": True}),
    ("GoMuon", {"specs": {"*.q.weight": HEADS, "*.o.weight": LayerSpec(input_heads=2)}}),
    ("GoMuon", {"specs": {"*.up.weight": LayerSpec(block=7)}}),
    ("GoMuon", {"max_condition": 10.0, "graft": None}),
    ("SOAP", {"specs": {"*.q.weight": HEADS}}),
    ("GoMuon", {"cautious_decay": True, "weight_decay": 0.1, "lr_scale": "adamw"}),
]


def run(
    method: str, settings: dict[str, Any], dtype: torch.dtype, *, watched: bool
) -> tuple[nn.Module, MatrixOptimizer, list[WatchRecord]]:
    model = transformer(dtype=dtype, layers=1)
    optimizer = make(method, model, **settings)
    records: list[WatchRecord] = []
    if watched:
        optimizer.watch(every=3, to=records.extend, spectra=1)
        optimizer.watch(every=2, spectra=3)  # several watches do not disturb each other
    train(model, optimizer, range(STEPS))
    return model, optimizer, records


@pytest.mark.parametrize(
    ("method", "settings"), CASES, ids=["-".join((name, *keys)) for name, keys in CASES]
)
def test_watching_changes_no_bit(method: str, settings: dict[str, Any]) -> None:
    plain, before, _ = run(method, settings, torch.float32, watched=False)
    watched, after, records = run(method, settings, torch.float32, watched=True)
    assert_equal(plain, watched)
    compare_states(before.state_dict(), after.state_dict())
    layers = {row.name for row in after.routing_table().treated("matrix")}
    assert {record.layer for record in records} == layers
    assert {record.step for record in records} == {3, 6, 9}


def compare_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    one, other = saved(one), saved(other)
    assert one["state"].keys() == other["state"].keys()
    for key, entries in one["state"].items():
        assert entries.keys() == other["state"][key].keys()
        for name, value in entries.items():
            there = other["state"][key][name]
            same = torch.equal(value, there) if torch.is_tensor(value) else value == there
            assert same, name


def test_in_float64_too() -> None:
    plain, *_ = run("GoMuon", {}, torch.float64, watched=False)
    watched, *_ = run("GoMuon", {}, torch.float64, watched=True)
    assert_equal(plain, watched)


class Experts(nn.Module):
    """Two experts in one parameter; the second one has no row in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(2, 6, 8) / 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, split: int) -> torch.Tensor:
        parts = [x[:split] @ self.experts[0].mT, x[split:] @ self.experts[1].mT]
        return self.head(torch.cat(parts).relu())


@pytest.mark.parametrize("watched", [False, True])
def test_a_stack_of_experts(watched: bool) -> None:
    model = Experts()
    specs = {"experts": LayerSpec(stack=True)}
    optimizer = GoMuon(model, routes={"experts": "matrix"}, specs=specs, refresh_every=2)
    watch = optimizer.watch(every=2, spectra=1) if watched else None
    for step in range(8):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(9, 8), 9 if step % 4 == 2 else 5).square().mean().backward()
        optimizer.step()
    if watch is None:
        FOUND["plain"] = model.experts.detach()
        return
    assert torch.equal(FOUND["plain"], model.experts)
    last = watch.latest["experts"]
    assert (last.matrices, last.rows, last.columns, last.full_rank) == (2, 6, 8, 12)
    assert last.oracle_value is not None
    assert last.efficiency is not None


FOUND: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("method", ["GoMuon", "Muon", "KFAC", "Shampoo", "SOAP"])
def test_without_a_watch_the_operations_are_those_of_one_that_never_was(method: str) -> None:
    """The same operators, on the same shapes, in the same order."""

    def operations(*, once_watched: bool) -> list[tuple[str, Any, Any]]:
        model = transformer(dtype=torch.float32, layers=1)
        optimizer = make(method, model)
        if once_watched:
            with optimizer.watch(every=1, spectra=1):
                train(model, optimizer, range(1))
        else:
            train(model, optimizer, range(1))
        assert not optimizer._step.observers
        with OperationRecorder() as record:
            train(model, optimizer, range(1, 6))
        return [(x.name, x.shapes, x.dtypes) for x in record.operations]

    assert operations(once_watched=True) == operations(once_watched=False)


def test_every_method_is_watched() -> None:
    assert {method for method, _ in CASES} == set(METHODS)
    assert Muon.recipe.name in METHODS
