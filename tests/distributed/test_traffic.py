"""What goes through the process group is what `gomuon plan` says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gomuon.distributed import narrow_sums
from gomuon.lab.costs import planned_model
from gomuon.lab.costs.estimate import CostEstimate, RankLayout, estimate_cost
from gomuon.lab.costs.planned_model import PlannedModel
from gomuon.lab.costs.published_models import CONFIGURATIONS
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.experiments import optimizers
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import wrapped
from tests.models import OneUnit

MESHES = {"ddp": lambda n: Mesh(replicas=n), "fsdp": lambda n: Mesh(shards=n),
          "hybrid": lambda n: Mesh(2, n // 2)}  # fmt: skip


@contextmanager
def counted(place: Place) -> Iterator[list[float]]:
    """Bytes that leave this rank; what it keeps for itself is not sent."""
    sent = [0.0]

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def to_all(outputs: list[Tensor], mine: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += (len(outputs) - 1) * size(mine)
        return real["all_gather"](outputs, mine, *args, **kwargs)

    def ring(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_world_size(kwargs.get("group"))
        if "op" not in kwargs:  # not FSDP2's, of replicas
            sent[0] += 2 * (ranks - 1) / ranks * size(value)
        return real["all_reduce"](value, *args, **kwargs)

    def each(out: Tensor, mine: Tensor, get: list[int], give: list[int], **kwargs: Any) -> Any:
        kept = mine.split(give)[dist.get_rank(kwargs.get("group"))]
        sent[0] += size(mine) - size(kept)
        return real["all_to_all_single"](out, mine, get, give, **kwargs)

    def to_one(value: Tensor, root: int, *args: Any, **kwargs: Any) -> Any:
        sent[0] += size(value) * (place.rank != root)
        return real["reduce"](value, root, *args, **kwargs)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("objects are for the first step and for faults")

    mine: dict[str, Callable[..., Any]] = {
        "all_gather": to_all,
        "all_reduce": ring,
        "reduce": to_one,
        "all_to_all_single": each,
        "all_gather_object": never,
    }
    real = {name: getattr(dist, name) for name in mine}
    for name, function in mine.items():
        setattr(dist, name, function)
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def small() -> nn.Module:
    torch.manual_seed(0)
    return CONFIGURATIONS["character"].build()


Sent = tuple[str, str, str, dict[str, Any]]  # wrapper, method, work and settings
NARROW = {"sums_dtype": "bfloat16"}
CUT = {"block_size": 50, "max_side": 200, "long_sides": "diagonal"}


def bytes_of_steps(
    place: Place, case: Sent, steps: int, build: Callable[[], nn.Module] = small
) -> list[float]:
    kind, method, work, changes = case
    model = wrapped(build(), kind)
    settings = {**changes, **({} if work == "shared" else {"work": work})}
    optimizer = optimizers.build(method, model, 1e-3, 1e-3, settings)
    sent = []
    for step in range(steps):
        tokens = torch.randint(0, 31, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(tokens).logsumexp(-1).mean()
        if step == 0:  # ranks are compared
            loss.backward()
            optimizer.step()
            continue
        with counted(place) as bytes_sent:
            loss.backward()  # captured sums are sent here
            optimizer.step()
        sent.append(bytes_sent[0])
    return sent


def all_cases(
    place: Place, cases: list[Sent], build: Callable[[], nn.Module] = small
) -> list[list[float]]:
    return [bytes_of_steps(place, case, 6, build) for case in cases]


def assert_planned(
    answers: list[list[list[float]]], cases: list[Sent], about: PlannedModel
) -> list[CostEstimate]:
    """Every step of every case has the bytes that the plan gives for this step of its cycle."""
    size, planned = len(answers), []
    for index, (kind, method, work, changes) in enumerate(cases):
        ranks = RankLayout(MESHES[kind](size), replicate=work == "replicated")
        figures = estimate_cost(method, about, ranks, changes)
        for step in range(1, 6):
            sent = [answer[index][step - 1] for answer in answers]
            expected = figures.cycle[step % len(figures.cycle)].sent
            # To the byte; what sums over a ring cost is rounded.
            assert max(sent) == pytest.approx(expected.largest, abs=1), (kind, method, step)
            assert sum(sent) / size == pytest.approx(expected.mean, abs=1), (kind, method, step)
        planned.append(figures)
    return planned


def assert_character_planned(answers: list[list[list[float]]], cases: list[Sent]) -> None:
    about = planned_model.published_model("character", tokens=None, dtype="float32")
    planned = assert_planned(answers, cases, about)
    for (_, method, work, changes), figures in zip(cases, planned, strict=True):
        captures = method not in ("muon", "muon-qk")
        assert figures.staggered == (captures and changes.get("stagger", work == "shared"))


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (
            2,
            [
                ("ddp", "go-muon", "shared", {}),
                ("fsdp", "go-muon", "shared", {}),
                ("ddp", "go-muon", "replicated", {}),
                ("fsdp", "muon", "shared", {}),
                ("ddp", "go-muon", "shared", {"stagger": False}),
                ("ddp", "go-muon", "replicated", {"stagger": True}),
                ("ddp", "kfac", "shared", {}),
                ("ddp", "kfac", "shared", {"refresh_every": 4, "statistics_every": 2}),
                ("fsdp", "muon-qk", "shared", {}),
                ("fsdp", "newton-muon", "shared", {}),
                ("ddp", "go-muon", "replicated", CUT),
                ("fsdp", "go-muon", "shared", CUT),
                ("ddp", "kfac", "shared", CUT),
                ("ddp", "go-muon", "shared", NARROW),
                ("fsdp", "kfac", "shared", {**CUT, **NARROW}),
            ],
        ),
        (4, [("hybrid", "go-muon", "shared", {}), ("fsdp", "go-muon", "shared", {})]),
        (4, [("hybrid", "go-muon", "shared", NARROW), ("fsdp", "go-muon", "shared", NARROW)]),
    ],
    ids=["2", "4", "4 narrow"],
)
def test_bytes_per_step_are_the_plans(size: int, cases: list[Sent], tmp_path: Path) -> None:
    assert_character_planned(launch(size, all_cases, tmp_path, cases=cases), cases)


def sliced_cases(place: Place, cases: list[Sent]) -> list[list[float]]:
    """As on more ranks than those of which an owner adds up all parts."""
    narrow_sums.OWNER_ADDS = 1
    return all_cases(place, cases)


def test_bytes_of_slices_are_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_sums, "OWNER_ADDS", 1)
    cases: list[Sent] = [
        ("ddp", "go-muon", "shared", NARROW),
        ("fsdp", "go-muon", "shared", {**CUT, **NARROW}),
    ]
    assert_character_planned(launch(3, sliced_cases, tmp_path, cases=cases), cases)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_split_units_are_the_plans(size: int, tmp_path: Path) -> None:
    """Sums of an input that layers of several owners read go to each of these owners."""
    cases: list[Sent] = [
        ("ddp", "go-muon", "shared", {}),
        ("fsdp", "go-muon", "shared", {"stagger": False, "input_decay": 0.9}),
        ("fsdp", "kfac", "shared", {"block_size": 7}),
        ("ddp", "go-muon", "replicated", {}),
    ]
    answers = launch(size, all_cases, tmp_path, cases=cases, build=OneUnit)
    about = planned_model.users_model("tests.models:OneUnit", "1,16", None, "float32")
    for (_, _, work, _), figures in zip(cases, assert_planned(answers, cases, about), strict=True):
        assert len({owner for _, owner in figures.owned}) == (size if work == "shared" else 0)
