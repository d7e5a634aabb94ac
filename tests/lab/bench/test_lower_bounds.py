"""The lower bound of a step counts its products and decompositions, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.lab.bench import bench_tables, lower_bounds, targets, workloads
from gomuon.lab.bench.arms import gomuon_optimizer
from gomuon.lab.bench.interleaving import Runner
from gomuon.lab.bench.workloads import Workload
from gomuon.recipes.work import Decomposition, flops
from tests.lab.helpers.made_bench import made_result

KERNELS = {"polar": 0.4, "whitened": 0.5, "maps": 0.1, "roots": 0.8, "moments": 0.4}


def runner(workload: Workload, method: str) -> Runner:
    model = workload.make()
    made = Runner(model, gomuon_optimizer(method)(model), workload)
    for _ in range(2):
        made.timed_step()
    return made


def test_the_paper_s_model_is_counted_once() -> None:
    parts = lower_bounds.parts(workloads.find("paper", "full"))
    # Three layers of q, k, v, o, gate, up, down; q, k, v share an input, gate and up another.
    roots = [(op.count, op.m) for op in parts["roots"] if isinstance(op, Decomposition)]
    assert sum(count for count, d in roots if d == 384) == 9
    assert sum(count for count, d in roots if d == 128) == 24
    # Two products on each side: P_B [m, m] and P_A [n, n] of twelve 128×128 and nine 384×128.
    squares, others = 12 * 2 * 128**3, 9 * (384 * 384 * 128 + 384 * 128 * 128)
    assert flops(parts["maps"]) == 2 * 2 * (squares + others)


def test_every_kind_of_work_takes_time() -> None:
    workload = workloads.find("paper", "tiny")
    muon, go_muon = runner(workload, "Muon"), runner(workload, "GoMuon")
    seconds = lower_bounds.measure(workload, {"muon": muon, "go-muon-4": go_muon})
    assert list(seconds) == ["polar", "whitened", "maps", "roots", "moments"]
    assert all(taken > 0 for taken in seconds.values())
    assert list(lower_bounds.measure(workload, {"muon": muon})) == [
        "polar",
        "maps",
        "roots",
        "moments",
    ]


def test_sources_are_those_of_the_step_that_is_timed() -> None:
    workload = workloads.find("paper", "tiny")
    made = runner(workload, "GoMuon")
    stepped: list[Tensor] = []
    optimizer: Any = made.stepper
    optimizer.add_observer(lambda stack, source, U: stepped.append(stack.map("left_map") @ source))
    found = lower_bounds.sources(made)
    assert [X.shape for X in found] == [X.shape for X in stepped]
    # Whitened on both sides, and by other maps than the identity.
    assert all(not torch.allclose(X, Y) for X, Y in zip(found, stepped, strict=True))
    # Each of seven layers once, and the observer that looked is gone.
    assert sum(len(X) for X in found) == 7
    made.timed_step()
    assert sum(len(X) for X in found) == 7


@pytest.mark.parametrize(
    ("arm", "quantity", "least"),
    [
        ("muon", "step", 0.2),
        ("go-muon-1", "step", 0.7),
        ("go-muon-4", "step", 0.4),
        ("go-muon-4", "whole", 0.45),
        ("go-muon-4", "peak", None),
        ("torch-muon", "step", None),
        ("plain-go-muon-1", "whole", None),
        ("soap", "step", None),
    ],
)
def test_refreshes_count_once_in_k_steps(arm: str, quantity: str, least: float | None) -> None:
    assert lower_bounds.least(KERNELS, arm, quantity, threads=2) == pytest.approx(least)
    assert lower_bounds.least({}, arm, quantity, threads=2) is None


def test_the_bars_say_what_their_floor_is() -> None:
    result = made_result(paper={"go_muon_4": 0.9, "torch_muon": 5.0, "go_muon_1": 1.0})
    assert all(reading.lower_bound is None for reading in targets.check(result))
    result["workloads"]["paper"]["kernels"] = KERNELS
    lower_bound = [reading.lower_bound for reading in targets.check(result)]
    assert lower_bound[:3] == pytest.approx([0.4 / 5.0, 0.4 / 1.0, (1.0 + 0.45) / (1.0 + 0.9)])
    assert lower_bound[3:] == [None] * 9  # the other side was not measured
    result["workloads"]["wide"] = result["workloads"].pop("paper")
    wide = [r.lower_bound for r in targets.check(result) if r.target.workload == "wide"]
    assert wide == [None, None]  # Go-MUON was measured there, Muon was not
    result = made_result(wide={"go_muon_4": 0.9, "go_muon_16": 0.8, "muon": 0.5})
    result["workloads"]["wide"]["kernels"] = KERNELS
    wide = [r.lower_bound for r in targets.check(result) if r.target.workload == "wide"]
    assert wide == pytest.approx([0.4 / 0.2, 0.325 / 0.2])  # both at their least
    result = made_result(paper={"go_muon_4": 0.9, "torch_muon": 5.0})
    result["workloads"]["paper"]["kernels"] = KERNELS
    assert bench_tables.target_table(result).rows[0][-1] == "0.080"
