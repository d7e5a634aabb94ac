"""Whole steps by tokens per step."""

from __future__ import annotations

import pytest

from gomuon.lab.bench import further_tables, tokens_per_step
from gomuon.lab.bench.all_arms import choose
from gomuon.lab.bench.arms import BenchArm, CannotTrain, Stepper
from gomuon.lab.bench.tokens_per_step import workload
from tests.lab.helpers.made_bench import made_result


@pytest.mark.parametrize("size", ["full", "quick", "tiny"])
def test_a_batch_has_the_tokens(size: str) -> None:
    for tokens in tokens_per_step.SIZES[size]:  # type: ignore[index]
        work = workload(tokens, size)  # type: ignore[arg-type]
        assert all(inputs.numel() == tokens for inputs, _ in work.batches)


def test_the_full_axis_is_the_papers_model() -> None:
    assert tokens_per_step.SIZES["full"] == (512, 2048, 8192, 16384)
    assert workload(2048, "full").batches[0][0].shape == (16, 128)
    model = workload(512, "full").make()
    assert sum(p.numel() for p in model.parameters()) == 646_272


def test_all_arms_at_all_sizes() -> None:
    def unfit(model: object) -> Stepper:
        raise CannotTrain("made up")

    arms = [*choose("newton-schulz,go-muon-4"), BenchArm("odd", "Odd", "nowhere", unfit)]
    ticks = []
    found = tokens_per_step.measure("tiny", arms, 1, lambda name, step: ticks.append(name))
    assert found["sizes"] == [16, 64]
    assert found["arms"]["odd"] == {"title": "Odd", "failed": "made up"}
    for name in ("adamw", "newton-schulz", "go-muon-4"):
        entry = found["arms"][name]
        assert len(entry["whole"]) == len(entry["error"]) == 2
        assert all(ratio > 0 for ratio in entry["whole"])
        assert ticks.count(f"{name}@16") == ticks.count(f"{name}@64") == 17
    result = {**made_result(), "tokens": {"paper": found}}
    table = further_tables.tokens_table(result)
    assert table is not None
    assert table.columns == ("optimizer", "16 tokens", "64 tokens")
    assert table.rows[-1] == ("Odd", "made up")
    assert [len(row) for row in table.rows] == [3, 3, 3, 2]
    assert further_tables.tokens_table(made_result()) is None
