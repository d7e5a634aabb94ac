"""Tasks draw everything from the seed, and the same for every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import schedules, tasks
from gomuon.lab.experiments.digits import DigitsTask
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.experiments.tasks import CharacterTask, ModularAdditionTask, NanoGPTTask
from tests.lab.helpers.tiny_runs import TEXT, addition, characters, corpus_on_disk


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return corpus_on_disk(tmp_path / "data", monkeypatch)


def test_character_loss_is_next_character_cross_entropy(data_dir: Path) -> None:
    task = CharacterTask(characters(), data_dir)
    model = task.model()
    loss, extra = task.loss(model, 3)
    letters = sorted(set(TEXT))
    total = []
    for offset in task.offsets[2].tolist():
        codes = torch.tensor([letters.index(c) for c in TEXT[offset : offset + 9]])
        total.append(F.cross_entropy(model(codes[None, :-1])[0], codes[1:]))
    assert loss.item() == pytest.approx(torch.stack(total).mean().item(), rel=1e-6)
    assert extra == {}


def test_a_shorter_run_sees_a_prefix_of_the_longer_ones_stream(data_dir: Path) -> None:
    short = CharacterTask(characters(steps=4), data_dir)
    long = CharacterTask(characters(steps=10), data_dir)
    assert torch.equal(short.offsets, long.offsets[:4])
    assert len(long.offsets.unique()) > 10


def test_windows_never_run_past_the_text(data_dir: Path) -> None:
    task = CharacterTask(characters(steps=500, length=len(TEXT) - 2), data_dir)
    assert task.offsets.max().item() + task.config.length < len(TEXT)
    with pytest.raises(LabError, match="too long"):
        CharacterTask(characters(length=len(TEXT)), data_dir)


def nanogpt(**changes: object) -> RunConfig:
    facts = {"task": "nanogpt", "evaluate_every": 4, **changes}
    return characters(**facts)


def test_nanogpt_holds_out_the_last_tenth_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = corpus_on_disk(tmp_path, monkeypatch, name="shakespeare")
    task = NanoGPTTask(nanogpt(), data_dir)
    assert len(task.validation) == len(TEXT) // 10
    assert torch.equal(torch.cat([task.train, task.validation]), task.corpus.tokens)
    assert task.offsets.max().item() + task.config.length < len(task.train)
    model = task.model()
    assert [n for n, _ in model.named_parameters() if n.endswith("bias")] == []
    assert task.evaluate(model, 3) == {}
    found = task.evaluate(model, 4)
    # Each symbol of the held-out text is predicted once, from those of its own window.
    losses = []
    for start in range(0, len(task.validation) - 8, 8):
        window = task.validation[start : start + 9]
        losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:]))
    assert found == {"validation_loss": pytest.approx(torch.stack(losses).mean().item())}
    assert task.evaluate(model, task.config.steps) != {}, "the last update is always evaluated"
    with pytest.raises(LabError, match="held-out text has"):
        NanoGPTTask(nanogpt(length=len(TEXT) // 10), data_dir)


def test_nanogpts_residual_layers_start_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = corpus_on_disk(tmp_path, monkeypatch, name="shakespeare")
    model = NanoGPTTask(nanogpt(width=64, hidden=64, layers=2), data_dir).model()
    block = model.get_submodule("blocks.0")
    ratio = block.down.weight.std() / block.up.weight.std()  # type: ignore[union-attr, operator]
    assert ratio.item() == pytest.approx(0.5, rel=0.1), "1/√(2·2)"


def test_nanogpts_schedule_warms_up_and_ends_at_a_tenth() -> None:
    values = schedules.warmup_then_cosine(2000, warmup=100, floor=0.1)
    assert len(values) == 2000
    assert values[0] == pytest.approx(1 / 101)
    assert values[100] == 1.0
    assert values[1050] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize(("task", "layers"), [("digits-vit", 1), ("digits-conv", 2)])
def test_digits_hold_out_every_fifth_picture(task: str, layers: int) -> None:
    made = DigitsTask(characters(task=task, layers=layers, evaluate_every=5))
    assert (len(made.train[1]), len(made.test[1])) == (1437, 360)
    model, same = made.model(), made.model()
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)
    pictures, labels = made.test
    assert made.evaluate(model, 4) == {}
    assert made.evaluate(model, 5) == {
        "validation_loss": pytest.approx(F.cross_entropy(model(pictures), labels).item()),
        "test_accuracy": (model(pictures).argmax(1) == labels).double().mean().item(),
    }
    loss, _ = made.loss(model, 2)
    chosen = made.chosen[1]
    expected = F.cross_entropy(model(made.train[0][chosen]), made.train[1][chosen])
    assert loss.item() == pytest.approx(expected.item())


def test_modular_split_is_disjoint_complete_and_rounded_down() -> None:
    task = ModularAdditionTask(addition(modulus=7))
    train = {tuple(pair) for pair in task.train.tolist()}
    test = {tuple(pair) for pair in task.test.tolist()}
    assert (len(train), len(test)) == (24, 25)
    assert not train & test
    assert train | test == {(a, b) for a in range(7) for b in range(7)}


def test_modular_split_follows_the_seed() -> None:
    same = [ModularAdditionTask(addition(seed=seed)).chosen for seed in (1, 1, 2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_modular_loss_targets_are_sums_and_evaluation_is_due_every_tenth() -> None:
    task = ModularAdditionTask(addition(modulus=7))
    model = task.model()
    loss, extra = task.loss(model, 1)
    sums = torch.tensor([(a + b) % 7 for a, b in task.train.tolist()])
    logits = model(task.train)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, sums).item())
    assert extra["train_accuracy"] == (logits.argmax(1) == sums).double().mean().item()
    assert task.evaluate(model, 9) == {}
    right = [int(model(p[None]).argmax()) == int(p.sum()) % 7 for p in task.test]
    assert task.evaluate(model, 10) == {"test_accuracy": sum(right) / len(right)}


def test_cosine_runs_from_the_peak_to_zero() -> None:
    values = schedules.cosine(1001)
    assert values[0] == 1.0
    assert values[500] == pytest.approx(0.5)
    assert values[-1] == pytest.approx(0.0, abs=1e-15)
    assert values == sorted(values, reverse=True)
    assert schedules.cosine(1) == [1.0]


def test_warmup_rises_over_fifty_updates_and_stays() -> None:
    values = schedules.warmup_then_constant(80)
    assert values[0] == pytest.approx(1 / 50)
    assert values[24] == pytest.approx(0.5)
    assert values[49:] == [1.0] * 31


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "groking"}, "did you mean 'grokking'"),
        ({"modulus": 1}, "modulus must be at least 2"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        tasks.build(addition(**changes))


def test_a_shape_that_does_not_fit_is_a_users_error() -> None:
    with pytest.raises(LabError, match=r"width \(9\)"):
        tasks.build_model(tasks.build(addition(width=9)))
