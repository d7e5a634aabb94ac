"""Runs with a task and an optimizer from outside: what each gets, and how they continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import own_code, racing
from gomuon.lab.experiments.foreign import CombinedOptimizer
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.report.writing import write_report
from gomuon.lab.results.pairing import require_pair
from gomuon.lab.results.runs import CHECKPOINT, DIFFERS_AT, MANIFEST, METRICS, load_run
from gomuon.lab.running import execution
from gomuon.lab.running.session import Session
from gomuon.lab.running.training import UpdateReport, train
from gomuon.lab.running.trials import try_continuing
from tests.lab.helpers.own_classes import HERE, Line
from tests.lab.helpers.reports import edit_json
from tests.lab.helpers.tiny_runs import Silent, addition, metrics_of, stop_after
from tests.versions import HAS_MUON


def line(optimizer: str = "Descent", **changes: Any) -> RunConfig:
    """A run of the made task that takes milliseconds; a name without a colon is of the helpers."""
    name = optimizer if ":" in optimizer or optimizer == "adamw" else f"{HERE}:{optimizer}"
    facts: dict[str, Any] = {"task": f"{HERE}:Line", "optimizer": name, "lr": 0.05, "seed": 0}
    facts |= {"steps": 12, "arm": "made", "evaluate_every": 5, "checkpoint_every": 3}
    return RunConfig(**facts | changes)


RESUMED = {
    "plain descent": line(),
    "one that draws random numbers": line("Noisy"),
    "one that takes the model": line("OfModel"),
    "one that takes names": line("OfNames"),
    "one beside AdamW": line("MatricesOnly"),
    "PyTorch's SGD": line("torch.optim:SGD", options={"momentum": 0.9}),
    "PyTorch's AdamW": line("torch.optim:AdamW", options={"betas": [0.8, 0.9]}),
    "a method of our kind": line("OwnMuon"),
    "a method of ours": line("adamw"),
    "one on a task of ours": addition(optimizer=f"{HERE}:Noisy"),
    "PyTorch's Muon": line("torch.optim:Muon"),
    "heavyball's SOAP": line("heavyball:SOAP", lr=0.003),
    "heavyball's SOAP for matrices": line("heavyball:SOAP", options={"parameters": "matrices"}),
    "heavyball's Muon": line("heavyball:Muon", lr=0.003),
}


def skip_what_is_absent(config: RunConfig) -> None:
    if config.optimizer.startswith("heavyball"):
        pytest.importorskip("heavyball")
    if config.optimizer == "torch.optim:Muon" and not HAS_MUON:
        pytest.skip(f"torch {torch.__version__} has no Muon")


@pytest.mark.parametrize("config", RESUMED.values(), ids=RESUMED)
def test_a_stopped_run_ends_in_the_same_bytes(config: RunConfig, tmp_path: Path) -> None:
    skip_what_is_absent(config)
    notes: list[str] = []
    assert train(config, tmp_path / "whole", say=notes.append)
    assert not [note for note in notes if "exactly" in note]
    torch.manual_seed(5)  # what was drawn elsewhere does not matter
    assert not train(config, tmp_path / "stopped", stop=stop_after(7))
    assert (tmp_path / "stopped" / CHECKPOINT).exists()
    torch.rand(3)
    assert train(config, tmp_path / "stopped", say=notes.append)
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")
    first, second = (load_run(tmp_path / name) for name in ("whole", "stopped"))
    require_pair(first, second)
    assert DIFFERS_AT not in json.loads((tmp_path / "stopped" / MANIFEST).read_text())


def test_evaluations_are_made_in_eval_mode_at_their_updates(tmp_path: Path) -> None:
    train(line(), tmp_path)
    lines = load_run(tmp_path).metrics
    assert [m["step"] for m in lines if "validation_loss" in m] == [5, 10, 12]
    assert {m["training"] for m in lines if "training" in m} == {0.0}
    assert load_run(tmp_path).result["validation_loss"] == lines[-1]["validation_loss"]  # type: ignore[index]


def test_two_optimizers_see_the_same_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, config in {
        "descent": line(),
        "noisy": line("Noisy", options={}),
        "other": line(seed=1),
        "task": line(task=f"{HERE}:Failing"),
    }.items():
        session = Session(config)
        (tmp_path / f"{name}.json").write_text(json.dumps(session.hashes))
    first, second, other, task = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("descent", "noisy", "other", "task")
    )
    assert first == second
    assert {key for key in first if first[key] != other[key]} == {"corpus", "stream", "parameters"}
    assert {key for key in first if first[key] != task[key]} == {"model"}


def test_the_schedule_multiplies_the_rates_of_all_groups() -> None:
    session = Session(line("MatricesOnly", lr=0.5, adamw_lr=0.25, steps=3))
    assert isinstance(session.optimizer, CombinedOptimizer)
    assert [g["lr"] for g in session.optimizer.param_groups] == [0.5, 0.25]
    for step, factor in ((1, 1.0), (2, 0.5), (3, 0.0)):
        session.update(step)
        assert [g["lr"] for g in session.optimizer.param_groups] == [0.5 * factor, 0.25 * factor]
    session.optimizer.load_state_dict(session.optimizer.state_dict())
    session.update(1)
    assert [g["lr"] for g in session.optimizer.param_groups] == [0.5, 0.25]


def test_a_class_gets_what_its_first_argument_says() -> None:
    model = Session(line("OfModel", adamw_lr=0.7))
    assert model.optimizer.adamw_lr == 0.7  # type: ignore[union-attr]
    names = Session(line("OfNames")).optimizer.names  # type: ignore[union-attr]
    assert names == [name for name, _ in Line(0, 1).model().named_parameters()]
    session = Session(line("MatricesOnly"))
    assert session.note == f"{HERE}:MatricesOnly gets the matrices, and AdamW the other parameters"
    assert Session(line()).note == ""
    assert Session(line(options={"parameters": "matrices"})).note.endswith("other parameters")


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_muon_of_torch_leaves_convolutions_to_adamw() -> None:
    shape = {"task": "digits-vit", "width": 8, "layers": 1, "batch": 2}
    session = Session(addition(optimizer="torch.optim:Muon", **shape))
    assert session.note.startswith("torch.optim:Muon gets the matrices of two dimensions")
    assert isinstance(session.optimizer, CombinedOptimizer)
    muon, rest = session.optimizer.optimizers
    held = [p for part in (muon, rest) for g in part.param_groups for p in g["params"]]
    assert {p.ndim for g in muon.param_groups for p in g["params"]} == {2}
    assert len(held) == len({id(p) for p in held}) == len(list(session.model.parameters()))


def test_one_that_keeps_numbers_outside_its_state_starts_again(tmp_path: Path) -> None:
    for name, reason in {
        "Counting": "loaded from a checkpoint it makes other updates",
        "Unsavable": "its state cannot be saved",
    }.items():
        config, notes = line(name), list[str]()
        assert train(config, tmp_path / f"{name}-whole", say=notes.append)
        assert len(notes) == 1
        assert (
            f"{config.optimizer} with {config.task} does not continue exactly: {reason}" in notes[0]
        )
        assert notes[0].endswith("a run that is stopped starts again from its first update")
        folder = tmp_path / f"{name}-stopped"
        assert not train(config, folder, stop=stop_after(7), say=notes.append)
        assert not (folder / CHECKPOINT).exists()
        reports: list[UpdateReport] = []
        assert train(config, folder, report=reports.append, say=notes.append)
        assert reports[0].step == 1
        assert notes[1:] == notes[:1] * 2  # it says so each time
        assert metrics_of(folder) == metrics_of(tmp_path / f"{name}-whole")
        recorded = json.loads((folder / MANIFEST).read_text())["continuation"]
        assert recorded == {"checkpoints": False, "problem": notes[0]}


def test_one_that_does_not_repeat_says_so_and_never_claims_the_same_bytes(tmp_path: Path) -> None:
    notes: list[str] = []
    found = try_continuing(line("Unrepeatable"), None)
    assert found.checkpoints
    assert "does not repeat exactly" in found.problem
    assert not train(line("Unrepeatable"), tmp_path, stop=stop_after(7), say=notes.append)
    # As if it had been killed a few updates after its checkpoint.
    more = b"".join(b'{"step": %d, "loss": 1.0}\n' % step for step in (8, 9))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(more + b'{"step": 10, "lo')
    assert train(line("Unrepeatable"), tmp_path, say=notes.append)
    assert "update 8, made again, differs from the one before the run was stopped" in notes[-1]
    assert json.loads((tmp_path / MANIFEST).read_text())[DIFFERS_AT] == 8
    assert load_run(tmp_path).finished


def test_a_damaged_record_of_continuing_is_refused(tmp_path: Path) -> None:
    assert not train(line(), tmp_path, stop=stop_after(4))
    edit_json(tmp_path / MANIFEST, continuation="yes")
    with pytest.raises(LabError, match="'continuation' is 'yes'; expected checkpoints and problem"):
        train(line(), tmp_path)


WRONG = {
    "Failing": "loss(model, batch) raised ZeroDivisionError: no luck (own_classes.py, line",
    "NoModel": "model() returned a list; expected a torch.nn.Module",
    "EmptyModel": "model() returned a model without parameters",
    "OddBatch": "batch(1) has a object in it, which cannot be hashed; return tensors",
    "Remembering": "batch(1) returned something else when it was asked again; a batch must follow",
    "NumberLoss": "loss(model, batch) returned a float; expected a tensor with one number",
    "WideLoss": "returned a tensor of shape [16, 4]; expected one number that depends on the par",
    "DetachedLoss": "returned a tensor of shape [] without a gradient; expected one number",
    "NumberEvaluation": "evaluate(model) returned a float; expected a dict of numbers with 'valid",
    "OtherEvaluation": "evaluate(model) returned accuracy; expected a dict of numbers with 'vali",
    "ReservedEvaluation": "returned validation_loss, loss; expected a dict of numbers with 'vali",
    "WordEvaluation": "evaluate(model) has a value that is no number (could not convert string",
    "NoFingerprint": "fingerprint() returned None; expected what identifies the data",
    "ShortSchedule": "multipliers() returned 2 numbers; expected 1, one for each update",
    "WrongNorm": "max_norm must be a positive number, not -1.0",
    "NoArguments": "NoArguments(seed, steps) raised TypeError",
}
OPTIMIZERS = {
    "Refusing": "cannot be built from parameters with lr=0.1: RuntimeError: not these; docs/own.md",
    "RateLess": "has no default rate; give one for it",
    "Stumbling": "step() raised IndexError: out of range (own_classes.py, line",
    "GroupsWithoutRates": "has a group of parameters whose 'lr' is None; expected a number",
    "torch.optim:LBFGS": "step() raised TypeError",
    "torch.optim:SGD": "",
}


@pytest.mark.parametrize(("name", "words"), WRONG.items(), ids=WRONG)
def test_a_task_that_returns_something_wrong_is_refused_before_anything_is_written(
    name: str, words: str, tmp_path: Path
) -> None:
    plan = racing.race_plan(f"{HERE}:{name}", "muon,adamw")
    with pytest.raises(LabError) as refusal:
        execution.run_campaign(plan, tmp_path / "out", observer=Silent())
    assert str(refusal.value).startswith(f"task {HERE}:{name}: ")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "words"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_an_optimizer_that_refuses_is_named_before_anything_is_written(
    name: str, words: str, tmp_path: Path
) -> None:
    full = name if ":" in name else f"{HERE}:{name}"
    options = "" if words else f"{full}.nonsense=1"

    def race() -> None:
        plan = racing.race_plan(f"{HERE}:Line", full, options=options)
        execution.run_campaign(plan, tmp_path / "out", observer=Silent())

    with pytest.raises(LabError) as refusal:
        race()
    assert str(refusal.value).startswith(f"optimizer {full}")
    assert (words or "with lr=0.001, nonsense=1: TypeError") in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_share_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LabError, match="option parameters='half'; expected one of all, matrices"):
        Session(line(options={"parameters": "half"}))
    with pytest.raises(LabError, match="expected none, because it gets the model"):
        Session(line("OfModel", options={"parameters": "all"}))


def test_a_changed_source_is_refused_and_a_changed_version_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, notes = line("Noisy"), list[str]()
    plan = racing.race_plan(config.task, config.optimizer)
    execution.declare(plan, tmp_path)
    assert not train(config, tmp_path / "run", stop=stop_after(4))
    kept = metrics_of(tmp_path / "run")

    monkeypatch.setattr(own_code, "_version", lambda package: "9.9")
    assert not train(config, tmp_path / "run", stop=stop_after(1), say=notes.append)
    assert "versions changed after update 4" in notes[-1]
    assert load_run(tmp_path / "run").resumed[0].versions["tests"] == "9.9"

    monkeypatch.setattr(own_code, "_file_hash", lambda kind: "0" * 64)
    words = f"the source of {config.task} has changed since {tmp_path}"
    changed = racing.race_plan(config.task, config.optimizer)
    with pytest.raises(LabError, match=words) as refusal:
        execution.declare(changed, tmp_path)
    assert "is 000000000000; restore it to continue, or choose another folder" in str(refusal.value)
    with pytest.raises(LabError, match=words):
        train(config, tmp_path / "run")
    assert metrics_of(tmp_path / "run")[: len(kept)] == kept

    monkeypatch.setattr(own_code, "_file_hash", lambda kind: None)
    other = {name: {**source, "path": "elsewhere.Line"} for name, source in plan.own.items()}
    with pytest.raises(LabError, match=f"with {HERE}.Line as {config.task}, which is now elsewh"):
        own_code.require_same(plan.own, other, tmp_path)


def test_a_sweep_and_a_race_at_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{HERE}:Descent"
    words = ["--task", f"{HERE}:Line", "--optimizers", f"{name},muon"]
    few = ["--steps", "6", "--jobs", "1", "--threads", "1"]
    options = ["--options", f"{name}.further=(1,2),muon.nesterov=False"]
    assert cli.main(["tune", *words, *few, *options, "--grid", "2", "--out", "swept"]) == 0
    assert cli.main(["race", "--selection", "swept/selection.json", *few, "--timing"]) == 0
    folder = Path("runs") / f"race-{HERE}-Line-tuned"
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["arms"][0]["options"] == {"further": [1, 2]}
    assert plan["arms"][1]["options"] == {"nesterov": False}
    assert set(plan["own"]) == {name, f"{HERE}:Line"}
    assert json.loads((folder / "timing.json").read_text())["arms"] == [f"{HERE}-Descent", "muon"]
    write_report(folder)
    assert "Descent" in (folder / "report.md").read_text()
    assert "validation loss" in capsys.readouterr().out.replace("\n", " ")
