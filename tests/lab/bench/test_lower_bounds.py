"""The lower bound of a step counts its products and decompositions, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon import GoMuon
from gomuon.lab.bench import bench_tables, lower_bounds, targets, workloads
from gomuon.lab.bench.arms import gomuon_optimizer
from gomuon.lab.bench.interleaving import Runner
from gomuon.lab.bench.workloads import Workload
from gomuon.recipes.work import Decomposition, flops
from tests.lab.helpers.made_bench import made_result

KERNELS = {"polar": 0.5, "maps": 0.1, "roots": 0.8, "moments": 0.4}
POLAR_ALONE = {"polar": 0.4, "maps": 0.0, "roots": 0.0, "moments": 0.0}


def runner(workload: Workload, method: str, **options: Any) -> Runner:
    model = workload.make()
    made = Runner(model, gomuon_optimizer(method, **options)(model), workload)
    for _ in range(2):
        made.timed_step()
    return made


def test_the_paper_s_model_is_counted_once() -> None:
    workload = workloads.find("paper", "full")
    parts = lower_bounds.parts(workload, GoMuon(workload.make(), block_size=None))
    # Three layers of q, k, v, o, gate, up, down; q, k, v share an input, gate and up another.
    roots = [(op.count, op.m) for op in parts["roots"] if isinstance(op, Decomposition)]
    assert sum(count for count, d in roots if d == 384) == 9
    assert sum(count for count, d in roots if d == 128) == 24
    # Two products on each side: P_B [m, m] and P_A [n, n] of twelve 128×128 and nine 384×128.
    squares, others = 12 * 2 * 128**3, 9 * (384 * 384 * 128 + 384 * 128 * 128)
    assert flops(parts["maps"]) == 2 * 2 * (squares + others)


def test_every_kind_of_work_takes_time() -> None:
    workload = workloads.find("paper", "tiny")
    arms = {"muon": runner(workload, "Muon"), "go-muon-4": runner(workload, "GoMuon")}
    others = {"adamw": runner(workload, "SOAP")}
    seconds = lower_bounds.measure(workload, {**arms, **others})
    assert list(seconds) == ["muon", "go-muon-4"]
    assert all(taken > 0 for taken in seconds["go-muon-4"].values())
    assert list(seconds["go-muon-4"]) == list(KERNELS)
    assert [kind for kind, taken in seconds["muon"].items() if taken > 0] == ["polar"]


def test_what_is_timed_follows_the_settings_of_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def polar(X: Tensor, method: str) -> Tensor:
        asked.append(method)
        return X

    monkeypatch.setattr(lower_bounds, "polar", polar)
    workload = workloads.find("paper", "tiny")
    one = runner(workload, "GoMuon", polar="svd", alpha=(0.0, 0.25), token_stride=4)
    lower_bounds.measure(workload, {"one": one})
    assert set(asked) == {"svd"}
    both: Any = runner(workload, "GoMuon").stepper
    found: Any = one.stepper
    fewer, all_of_it = lower_bounds.parts(workload, found), lower_bounds.parts(workload, both)
    assert all(0 < flops(fewer[kind]) < flops(all_of_it[kind]) for kind in fewer)


def test_sources_are_those_of_the_step_that_is_timed() -> None:
    workload = workloads.find("paper", "tiny")
    made = runner(workload, "GoMuon")
    stepped: list[Tensor] = []
    optimizer: Any = made.stepper
    optimizer.add_observer(lambda layer: stepped.append(layer.left_map @ layer.source))
    found = [X for stack in lower_bounds.sources(made) for X in stack.split(1)]
    assert [X.shape for X in found] == [X.shape for X in stepped]
    # Whitened on both sides, and by other maps than the identity.
    assert all(not torch.allclose(X, Y) for X, Y in zip(found, stepped, strict=True))
    # Each of seven layers once, and the observer that looked is gone.
    assert sum(len(X) for X in found) == 7
    made.timed_step()
    assert sum(len(X) for X in found) == 7


@pytest.mark.parametrize(
    ("seconds", "quantity", "interval", "least"),
    [
        (POLAR_ALONE, "step", 1, 0.2),
        (POLAR_ALONE, "whole", 1, 0.2),
        (KERNELS, "step", 1, 0.7),
        (KERNELS, "step", 4, 0.4),
        (KERNELS, "whole", 4, 0.45),
        (KERNELS, "peak", 4, None),
    ],
)
def test_refreshes_count_once_in_k_steps(
    seconds: dict[str, float], quantity: str, interval: int, least: float | None
) -> None:
    found = lower_bounds.least(seconds, quantity, interval, threads=2)
    assert found == pytest.approx(least)


def test_the_bars_say_what_their_floor_is() -> None:
    result = made_result(paper={"go_muon_4_fast": 0.9, "newton_schulz": 0.25, "muon_fast": 0.3})
    assert all(reading.lower_bound is None for reading in targets.check(result))
    kernels = {"go-muon-4-fast": KERNELS, "muon-fast": POLAR_ALONE}
    result["workloads"]["paper"]["kernels"] = kernels
    found = [reading.lower_bound for reading in targets.check(result)]
    assert found[:3] == pytest.approx([None, 1.45 / 1.25, 1.2 / 1.25])
    assert found[3:] == [None] * 9  # the other side was not measured
    assert bench_tables.target_table(result).rows[1][-1] == "1.16"
    # Two arms of ours are compared at their least.
    result["workloads"]["overhead"] = made_result(overhead={"muon": 0.5})["workloads"]["overhead"]
    result["workloads"]["overhead"]["kernels"] = {"muon": POLAR_ALONE, "adamw": KERNELS}
    overhead = [r.lower_bound for r in targets.check(result) if r.target.workload == "overhead"]
    assert overhead == pytest.approx([0.2 / 0.7, None])


def test_files_of_before_have_no_floors() -> None:
    """They hold seconds by kind of work alone, of other targets."""
    result = made_result(paper={"muon_fast": 0.3, "newton_schulz": 0.2})
    result["workloads"]["paper"]["kernels"] = {"polar": 0.4, "whitened": 0.5, "maps": 0.1}
    assert all(reading.lower_bound is None for reading in targets.check(result))
