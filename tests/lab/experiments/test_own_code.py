"""Classes from outside: their names, what is recorded of them, and what is refused, in words."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, own_code, racing, tasks, tuning
from gomuon.lab.experiments.content_hash import content_hash
from gomuon.lab.experiments.given_options import parse_options
from gomuon.lab.experiments.randomness import seed_all
from tests.lab.helpers import own_classes
from tests.lab.helpers.own_classes import HERE
from tests.versions import HAS_MUON

ROOT = Path(__file__).parents[3]
LINE = f"{HERE}:Line"


def test_a_race_is_planned_with_classes_from_outside() -> None:
    descent = f"{HERE}:Descent"
    plan = racing.race_plan(
        LINE, f"go-muon,{descent}", rates=f"{descent}=.5", options=f"{descent}.a=1", timing=True
    )
    first, second = plan.arms
    assert (second.name, second.optimizer, second.lr) == (f"{HERE}-Descent", descent, 0.5)
    assert second.title == f"Descent ({HERE}) 0.5"
    assert second.options == {"a": 1}
    assert plan.comparisons == ((second.name, first.name),)
    assert plan.timing == (first.name, second.name)
    assert (plan.steps, plan.settings["evaluate_every"], plan.label) == (12, 5, "full")
    assert racing.race_plan(LINE, "muon", steps=5).label == "quick"
    assert plan.statistic.startswith("loss on held-out data")
    source = hashlib.sha256(Path(own_classes.__file__).read_bytes()).hexdigest()
    assert plan.own[descent]["sha256"] == plan.own[LINE]["sha256"] == source
    assert plan.declaration()["own"] == plan.own
    assert "own" not in racing.race_plan("grokking", "muon").declaration()


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_a_package_is_recorded_with_its_version() -> None:
    source = own_code.source_of("torch.optim:Muon", "optimizer")
    assert source.path == "torch.optim.Muon"
    written = Path(inspect.unwrap(torch.optim.Muon.__init__).__code__.co_filename)
    assert source.sha256 == hashlib.sha256(written.read_bytes()).hexdigest()
    assert source.package == "torch"
    assert source.version is not None
    assert torch.__version__.startswith(source.version.split("+")[0])
    assert optimizers.has_momentum("torch.optim:Muon")
    assert optimizers.default_rate("torch.optim:Muon", "ptb") == 1e-3
    found = tuning.tune_plan(LINE, "torch.optim:Muon,go-muon", grid=2, momenta=".5,.9")
    assert [arm.options for arm in found.arms[:4:2]] == [{"momentum": 0.5}, {"momentum": 0.9}]
    assert {len([a for a in found.arms if a.optimizer == n]) for n in found.own if n != LINE} == {4}


def test_a_file_is_named_by_its_path() -> None:
    name = f"{ROOT}/examples/own_task.py:Checkerboard"
    assert own_code.slug(name) == "own_task-Checkerboard"
    assert own_code.title(name) == "Checkerboard (own_task.py)"
    assert tasks.defaults(name) == {"steps": 300, "evaluate_every": 50, "adamw_lr": 3e-3}
    assert own_code.source_of(name, "task").as_dict() == {
        "path": "own_task.Checkerboard",
        "sha256": hashlib.sha256((ROOT / "examples/own_task.py").read_bytes()).hexdigest(),
        "package": None,
        "version": None,
    }


def test_a_method_of_our_kind_keeps_its_recipe() -> None:
    name = f"{HERE}:OwnMuon"
    assert optimizers.foreign(name) is None
    assert optimizers.default_rate(name, LINE) == 0.02
    made = optimizers.build(name, own_classes.Line(0, 1).model(), 0.02, 0.5, {"nesterov": False})
    assert type(made) is own_classes.OwnMuon
    assert {group["lr"] for group in made.param_groups} == {0.02, 0.5}


def race(task: str = LINE, names: str = "adamw", **given: str) -> Callable[[], object]:
    return lambda: racing.race_plan(task, names, **given)  # type: ignore[arg-type]


REFUSED = {
    "no class": (race(f"{HERE}:Lime"), f"unknown class of {HERE} 'Lime'; did you mean 'Line'?"),
    "no module": (race("no_such_module:Line"), "cannot be imported: ModuleNotFoundError"),
    "no file": (race("nowhere/gone.py:Line"), "task nowhere/gone.py:Line: there is no such file"),
    "no name": (race("torch:"), "'torch:' is not understood; write module:Class or path/to"),
    "no place": (race(":Line"), "':Line' is not understood"),
    "a relative module": (race("..:Line"), "task ..:Line cannot be imported"),
    "a number": (race(f"{HERE}:NOT_A_CLASS"), "is a int; expected a class"),
    "an optimizer as task": (race(f"{HERE}:Descent"), "has no method model(); a task has model"),
    "an empty task": (race(f"{HERE}:WithoutEvaluation"), "has no method model()"),
    "no steps": (race(f"{HERE}:WithoutSteps"), "its attribute steps must be a whole number"),
    "a wrong rate": (race(f"{HERE}:WrongRate"), "its attribute adamw_lr must be a number"),
    "a flag of ours": (
        lambda: racing.race_plan(LINE, "adamw", width=8),
        f"--width does not apply to the task {LINE}; set it in its class",
    ),
    "a task as optimizer": (
        race(names=LINE),
        f"optimizer {LINE} is no optimizer; expected a class derived from torch.optim.Optimizer",
    ),
    "torch's base": (race(names="torch.optim:Optimizer"), "is no optimizer"),
    "no default rate": (
        race(names=f"{HERE}:NoRate"),
        f"has no default rate; give one for it, as --lr {HERE}:NoRate=.01 for race",
    ),
    "a rate of another": (race(rates="torch.optim:SGD=.1"), "'torch.optim:SGD', which is not amo"),
    "options of another": (race(options="muon.a=1"), "--options names 'muon', which is not among"),
    "options without a key": (race(options="adamw=1"), "--options 'adamw=1' is not understood"),
    "options without a value": (race(options="adamw.a="), "--options 'adamw.a=' is not underst"),
    "an option twice": (race(options="adamw.a=1,adamw.a=2"), "--options has adamw.a twice"),
    "a rate as option": (race(options="adamw.lr=1"), "a rate is given with --lr"),
    "an endless option": (race(options="adamw.a=1e999"), "is not a finite number"),
    "an open bracket": (race(options="adamw.a=(1"), "'(1' is not understood"),
    "commas alone": (race(options=","), "--options ',' has no value"),
    "two momenta": (
        lambda: tuning.tune_plan(LINE, "muon", momenta=".5", options="muon.momentum=.9"),
        "--options gives muon a momentum, which --momenta tries",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planned_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(LabError) as refusal:
        call()
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tune_needs_no_default_where_rates_are_given() -> None:
    name = f"{HERE}:NoRate"
    plan = tuning.tune_plan(LINE, name, rates=f"{name}=.1/.2")
    assert [arm.lr for arm in plan.arms] == [0.1, 0.2]


def test_options_are_numbers_texts_and_lists() -> None:
    text = "adamw.betas=(.9,.95),adamw.fused=False,x:Y.mode=fast,x:Y.n=3,x:Y.none=None"
    assert parse_options(text, ["adamw", "x:Y"]) == {
        "adamw": {"betas": [0.9, 0.95], "fused": False},
        "x:Y": {"mode": "fast", "n": 3, "none": None},
    }
    assert parse_options("", ["adamw"]) == {}


def test_names_of_ours_are_never_taken_for_outside() -> None:
    assert not any(map(own_code.is_own, [*tasks.TASKS, *optimizers.names()]))
    with pytest.raises(LabError, match="only race and tune take it"):
        optimizers.find(f"{HERE}:Descent")


def test_hashes_of_content_tell_everything_apart() -> None:
    different: list[Any] = [
        *(0, 0.0, False, None, "", "0", b"", [], {}, [[]], [0], {"a": 0}, {0: "a"}),
        *(torch.zeros(()), torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1)),
        *(numpy.zeros(1), numpy.zeros(1, numpy.float32), numpy.ones(1), [torch.zeros(1), 0]),
    ]
    assert len({content_hash(value) for value in different}) == len(different)
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    with pytest.raises(TypeError, match="a object"):
        content_hash([object()])


def test_random_numbers_follow_from_seed_purpose_and_step() -> None:
    def drawn(*place: object) -> tuple[float, float]:
        seed_all(*place)  # type: ignore[arg-type]
        return torch.rand(()).item(), float(numpy.random.rand())  # noqa: NPY002

    places = [(0, "update", 1), (0, "update", 2), (1, "update", 1), (0, "batch", 1)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(*places[0]) == drawn(*places[0])
