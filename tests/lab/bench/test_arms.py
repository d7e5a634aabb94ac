"""Every arm trains every model it can train; otherwise it says why."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import pytest
import torch

from gomuon.lab.bench import (
    all_arms,
    growth,
    measurement,
    other_packages,
    own_arms,
    targets,
    tokens_per_step,
    workloads,
)
from gomuon.lab.bench.all_arms import arms_by_name, arms_for, choose
from gomuon.lab.bench.arms import REFERENCE, BenchArm, CannotTrain
from gomuon.lab.bench.bench_parts import BenchmarkSettings
from gomuon.lab.bench.networks import ResNet18
from gomuon.lab.bench.own_arms import OWN
from gomuon.lab.bench.runners import build_runner
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.optimizers import command_name
from gomuon.recipes.registry import METHODS
from tests.versions import HAS_MUON

RIVALS = other_packages.package_arms(compiled=False)
PLAIN = {"plain-go-muon-1", "plain-go-muon-4", "plain-muon"}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def step_times(arm: BenchArm, name: str) -> dict[str, object]:
    work = workloads.find(name, "tiny")
    reference = arms_by_name()[REFERENCE]
    found = measurement.measure(work, [reference, arm], 2, lambda name, step: None)
    entry: dict[str, object] = found["arms"][arm.name]
    return entry


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        pytest.param(arm, name, id=f"{arm.name}-{name}")
        for name in ("paper", "mlp", "conv", "resnet")
        for arm in arms_for(name, "", full=False)[0]
        if arm in OWN
    ],
)
def test_own_arms_train_every_model_they_are_meant_for(arm: BenchArm, name: str) -> None:
    if arm.name == "torch-muon" and not HAS_MUON:
        pytest.skip(f"torch {torch.__version__} has no Muon")
    entry = step_times(arm, name)
    if name == "conv" and arm.name in {"torch-muon", *PLAIN}:
        assert "only" in str(entry["failed"])
        return
    assert "failed" not in entry
    assert isinstance(entry["state_bytes"], int)
    assert entry["state_bytes"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_a_polar_factor_has_a_fast_tier(method: str) -> None:
    """So that no rival of Go-MUON is handicapped."""
    name = command_name(method)
    if "polar" not in METHODS[method].recipe.settings:
        assert f"{name}-fast" not in arms_by_name()
        return
    names = ["go-muon-4", "go-muon-16"] if method == "GoMuon" else [name]
    arms, work = arms_by_name(), workloads.find("paper", "tiny")
    polars = [build_runner(arms[n], work).stepper.defaults["polar"] for n in names]  # type: ignore[attr-defined]
    assert polars == [METHODS[method].recipe.defaults["polar"]] * len(names)
    fast: Any = build_runner(arms[f"{names[0]}-fast"], work).stepper
    chosen = {key: fast.defaults[key] for key in own_arms.FAST if key in fast.recipe.settings}
    assert chosen.items() <= own_arms.FAST.items()
    assert "polar" in chosen


def test_exact_arms_stay_exact_whatever_the_default_becomes() -> None:
    work = workloads.find("paper", "tiny")
    for name in ("muon-exact", "go-muon-4-exact"):
        optimizer: Any = build_runner(arms_by_name()[name], work).stepper
        assert optimizer.defaults["polar"] == own_arms.EXACT["polar"]


def test_every_arm_that_is_selected_exists() -> None:
    selected = {*all_arms.USUAL, *growth.ARMS, *tokens_per_step.ARMS}
    selected |= {name for names in all_arms.ENOUGH.values() for name in names}
    selected |= {name for names in all_arms.TOO_SLOW.values() for name in names}
    assert selected <= set(arms_by_name())
    assert {*all_arms.ENOUGH, *all_arms.TOO_SLOW, all_arms.EVERY_ARM} <= set(workloads.NAMES)
    # Every target can be measured with the arms that are selected without being named.
    for workload in workloads.NAMES:
        arms, _ = arms_for(workload, "", full=True)
        assert targets.arms_of(workload) <= {arm.name for arm in arms}, workload
    on_paper = {arm.name for arm in arms_for("paper", "", full=True)[0]}
    assert on_paper == set(arms_by_name())


def test_gpt2_is_trained_by_transformers_own_layers() -> None:
    if not installed("transformers"):
        pytest.skip("Transformers is not installed")
    assert "failed" not in step_times(arms_by_name()["go-muon-4"], "gpt2")


@pytest.mark.parametrize("name", ["paper", "conv"])
@pytest.mark.parametrize("arm", RIVALS, ids=lambda arm: arm.name)
def test_other_packages_train_where_they_are_installed(arm: BenchArm, name: str) -> None:
    if not installed(arm.package):
        pytest.skip(f'{arm.package} is not installed (pip install "gomuon[bench]")')
    assert "failed" not in step_times(arm, name)


def test_a_package_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(other_packages, "load", missing)
    failed = str(step_times(RIVALS[0], "paper")["failed"])
    assert "heavyball is not installed" in failed
    assert "gomuon[bench]" in failed


def test_rivals_are_given_the_matrices_and_adamw_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    class Fake(torch.optim.SGD):
        def __init__(self, params: list[torch.Tensor], lr: float) -> None:
            given.extend(params)
            super().__init__(params, lr)

    fake = types.SimpleNamespace(SOAP=Fake, utils=types.SimpleNamespace(compile_mode="on"))
    monkeypatch.setattr(other_packages, "load", lambda name: fake)
    model = workloads.find("paper", "tiny").make()
    arm = next(arm for arm in RIVALS if arm.name == "heavyball-soap")
    stepper = arm.build(model)
    assert fake.utils.compile_mode is None, "compiling is switched off unless asked for"
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in given} == {
        name for name in names.values() if name.startswith("trunk.blocks") and "norm" not in name
    }
    first, second = stepper.optimizers  # type: ignore[attr-defined]
    held = [p for o in (first, second) for g in o.param_groups for p in g["params"]]
    assert sorted(map(id, held)) == sorted(names), "every parameter once"


def test_intervals_are_those_of_the_recipes_and_packages() -> None:
    work = workloads.find("paper", "tiny")
    ours = [arm for arm in OWN if arm.package == "gomuon"]
    assert all(arm.interval is None for arm in ours)
    found = {arm.name: build_runner(arm, work).interval for arm in ours}
    assert [found[f"go-muon-{K}"] for K in (1, 4, 16)] == [1, 4, 16]
    assert found["soap"] == found["shampoo"] == found["mousse"] == found["mousse-fast"] == 10
    assert found["muon"] == found["kfac"] == found["muon-fast"] == 1
    assert (found["kfac-muon"], found["matched-kfac"]) == (20, 50)
    assert found["newton-muon"] == 32
    found |= {name: arm.interval for name, arm in arms_by_name().items() if arm.interval}
    for package, name, key in (
        ("heavyball", "SOAP", "precondition_frequency"),
        ("pytorch_optimizer", "SOAP", "precondition_frequency"),
        ("pytorch_optimizer", "ScalableShampoo", "preconditioning_compute_steps"),
    ):
        if installed(package):
            import inspect

            default = inspect.signature(getattr(other_packages.load(package), name)).parameters[key]
            kind = "soap" if name == "SOAP" else "shampoo"
            assert found[f"{package.replace('_', '-')}-{kind}"] == default.default


def test_the_reference_always_takes_part_and_slow_ones_are_named() -> None:
    assert [arm.name for arm in choose("muon")] == [REFERENCE, "muon"]
    arms, omitted = BenchmarkSettings().arms_for("wide")
    assert "torch-muon" in {arm.name for arm in omitted}
    assert "torch-muon" not in {arm.name for arm in arms}
    arms, omitted = BenchmarkSettings(arms="torch-muon").arms_for("wide")
    assert [arm.name for arm in arms] == [REFERENCE, "torch-muon"]
    assert omitted == []
    work = workloads.find("paper", "tiny")
    slow = arms_by_name()["torch-muon"]
    found = measurement.measure(work, choose("muon"), 1, lambda *_: None, [slow])
    assert found["arms"]["torch-muon"]["failed"] == measurement.OMITTED


def test_an_arm_that_cannot_be_built_does_not_end_the_run() -> None:
    def unfit(model: torch.nn.Module) -> torch.optim.Optimizer:
        raise CannotTrain("made up")

    def broken(model: torch.nn.Module) -> torch.optim.Optimizer:
        raise KeyError("made up")

    for build, said in ((unfit, "made up"), (broken, "KeyError: 'made up'")):
        assert step_times(BenchArm("odd", "Odd", "nowhere", build), "paper")["failed"] == said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BenchmarkSettings(models="papers"), "unknown model 'papers'; did you mean 'paper'?"),
        (BenchmarkSettings(models="paper,paper"), "--models names 'paper' twice"),
        (BenchmarkSettings(arms="go-muon"), "unknown arm 'go-muon'; did you mean 'go-muon-"),
        (BenchmarkSettings(arms="zzz"), "known: "),
        (BenchmarkSettings(arms="muon,muon"), "--arms names 'muon' twice"),
        (BenchmarkSettings(cycles=0), "--cycles must be at least 1, not 0"),
    ],
)
def test_bad_wishes_are_refused_before_anything_runs(
    settings: BenchmarkSettings, words: str
) -> None:
    with pytest.raises(LabError) as caught:
        settings.check()
    assert words in str(caught.value)


def test_a_workload_is_the_same_at_every_call() -> None:
    for name in ("paper", "mlp", "conv", "resnet", "overhead"):
        one, other = workloads.find(name, "tiny"), workloads.find(name, "tiny")
        torch.rand(3)
        for p, q in zip(one.make().parameters(), other.make().parameters(), strict=True):
            assert torch.equal(p, q)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one.batches, other.batches, strict=True))


def test_the_full_models_are_those_the_bars_speak_of() -> None:
    paper = workloads.find("paper", "full").make()
    linears = [m for m in paper.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 21
    shapes = {tuple(m.weight.shape) for m in linears}
    assert shapes == {(128, 128), (384, 128), (128, 384)}
    assert workloads.find("paper", "full").batches[0][0].shape == (16, 128)
    chain = workloads.find("mlp", "full").make()
    assert [tuple(p.shape) for p in chain.parameters()] == [(512, 512)] * 4
    chain = workloads.find("mlp-2048", "full").make()
    assert [tuple(p.shape) for p in chain.parameters()] == [(2048, 2048)] * 4
    assert workloads.find("mlp-2048", "full").batches[0][0].shape == (1024, 2048)
    tiny = workloads.find("overhead", "full").make()
    assert [tuple(p.shape) for p in tiny.parameters()] == [(8, 8)] * 200


def test_resnet_has_the_parameters_and_shapes_of_torchvisions() -> None:
    model = ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert (len(shapes), shapes[0], shapes[-1]) == (20, (64, 3, 7, 7), (512, 512, 3, 3))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)
    batch = workloads.find("resnet", "full").batches[0]
    assert (batch[0].shape, batch[1].shape) == ((32, 3, 32, 32), (32,))
