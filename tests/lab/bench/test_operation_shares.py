"""FLOPs that an optimizer adds, by kind and dtype."""

from __future__ import annotations

import pytest
import torch

from gomuon import GoMuon
from gomuon.lab.bench import further_tables, operation_shares, workloads
from gomuon.lab.bench.all_arms import arms_by_name, choose
from gomuon.lab.bench.arms import BenchArm
from gomuon.lab.bench.operation_shares import DECOMPOSITIONS
from gomuon.lab.bench.runners import build_runner
from gomuon.lab.costs.matrix_layers import find_layers, units_of
from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.lab.costs.unit_costs import layers_work, renewal_work
from gomuon.recipes.work import flops
from tests.lab.helpers.made_bench import made_result
from tests.versions import HAS_MUON


def test_flops_by_dtype_and_decompositions_among_them() -> None:
    X = torch.eye(4)
    with OperationRecorder() as record:
        X @ X
        torch.linalg.eigh(X.double())
        X.bfloat16() @ X.bfloat16()
    counts = operation_shares.counted(record.operations)
    product, eigh = 2 * 4**3, 9 * 4**3
    expected = {"float32": product, "float64": eigh, "bfloat16": product, DECOMPOSITIONS: eigh}
    assert dict(counts) == expected


@pytest.mark.parametrize("name", ["muon", "go-muon-4"])
def test_shares_are_those_of_the_costs_that_are_stated(name: str) -> None:
    """On the paper's small model, of one refresh cycle without its moments."""
    workload = workloads.find("paper", "tiny")
    runner = build_runner(arms_by_name()[name], workload)
    bare = operation_shares._bare_flops(workload)
    found = operation_shares.flops_shares(runner, bare)
    assert found["cycle"]
    assert sum(found["shares"][kind] for kind in operation_shares.DTYPES) == pytest.approx(1)
    optimizer = runner.stepper
    recipe = type(optimizer).recipe  # type: ignore[attr-defined]
    layers = find_layers(runner.model, recipe, {**optimizer.defaults}).layers  # type: ignore[attr-defined]
    units = units_of(layers)
    steps = sum(flops(layers_work(unit, recipe.work.step)) for unit in units)
    added = found["flops"] * (bare.total() - bare[DECOMPOSITIONS])
    if name == "muon":
        assert added == pytest.approx(steps, rel=0.05)
    else:
        assert isinstance(optimizer, GoMuon)
        refresh = sum(flops(renewal_work(unit, recipe.work)) for unit in units)
        assert added > steps + refresh / 4, "and the moments"


def test_dtypes_are_told_apart() -> None:
    names = "newton-schulz" + (",torch-muon" if HAS_MUON else "")
    found = operation_shares.measure("tiny", choose(names), lambda name, step: None)["arms"]
    assert found["newton-schulz"]["shares"]["float32"] == 1
    assert found["newton-schulz"]["shares"][DECOMPOSITIONS] == 0
    assert found["adamw"]["flops"] == 0
    assert found["adamw"]["shares"] == {}
    if HAS_MUON:
        assert found["torch-muon"]["shares"]["bfloat16"] == 1
    result = {**made_result(), "operations": {"paper": {"arms": found}}}
    table = further_tables.operations_table(result)
    assert table is not None
    title, _, *shares, python = table.rows[1 + HAS_MUON]
    assert (title, shares) == ("five Newton–Schulz steps", ["0 %", "0 %", "100 %", "0 %"])
    assert str(python).endswith(" %")
    assert table.rows[0][1:6] == ("0.000", "–", "–", "–", "–")
    assert further_tables.operations_table(made_result()) is None


def test_a_cycle_longer_than_the_record_is_marked() -> None:
    build = arms_by_name()["newton-schulz"].build
    rare = BenchArm("rare", "Rare", "nowhere", build, interval=1000)
    arms = [*choose("kfac-muon"), rare]
    found = operation_shares.measure("tiny", arms, lambda name, step: None)
    assert found["arms"]["kfac-muon"]["cycle"]
    assert not found["arms"]["rare"]["cycle"]
    result = {**made_result(), "operations": {"paper": found}}
    table = further_tables.operations_table(result)
    assert table is not None
    assert [str(row[1]).endswith(" *") for row in table.rows] == [False, False, True]


def test_the_narrow_model_has_the_same_layers() -> None:
    wide, thin = workloads.find("paper", "full").make(), operation_shares.narrow("full").make()
    names = [name for name, _ in wide.named_parameters()]
    assert [name for name, _ in thin.named_parameters()] == names
    assert {tuple(p.shape) for p in thin.parameters() if p.ndim == 2} == {
        (50, 8), (8, 8), (24, 8), (8, 24)
    }  # fmt: skip
