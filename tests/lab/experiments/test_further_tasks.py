"""Held-out text, experts, LoRA and regression: what they promise, against plain computations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.lab.data import corpora
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import pretrained, tasks
from gomuon.lab.experiments.adapters import AdaptedLinear, DigitsLoRATask
from gomuon.lab.experiments.expert_mixture import (
    BALANCE,
    CHOSEN,
    EXPERTS,
    ExpertLayer,
    ExpertMixtureTask,
)
from gomuon.lab.experiments.held_out_text import HeldOutTextTask
from gomuon.lab.experiments.plan import HELD_OUT, loss_statistic
from gomuon.lab.experiments.regression import (
    INPUT_CONDITION,
    OUTPUT_CONDITION,
    SIGNAL,
    LinearMap,
    RegressionTask,
)
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results import pairing
from gomuon.lab.results.runs import METRICS, load_run
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import TEXT, characters, corpus_on_disk, stop_after

NEW = (
    *("ptb-validation", "shakespeare-validation", "gpt-validation"),
    *("experts", "digits-lora", "regression"),
)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both made corpora; the validation text has other words, and no symbol of its own."""
    monkeypatch.setattr(pretrained, "cache_folder", lambda: tmp_path / "cache")
    folder = corpus_on_disk(tmp_path / "data", monkeypatch)
    corpus_on_disk(tmp_path / "data", monkeypatch, name="shakespeare")
    other = corpus_on_disk(tmp_path / "other", monkeypatch, "over the lazy fox\n" * 20, "ptb-valid")
    source = corpora.CORPORA["ptb-valid"]
    (folder / "valid.txt").write_text((other / source.path).read_text())
    facts = {**vars(source), "path": "valid.txt"}
    monkeypatch.setitem(corpora.CORPORA, "ptb-valid", corpora.Source(**facts))
    return folder


def tiny(task: str, **changes: object) -> RunConfig:
    return characters(task=task, evaluate_every=5, **changes)


@pytest.mark.parametrize("task", NEW)
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    task: str, data_dir: Path, tmp_path: Path
) -> None:
    config = tiny(task, optimizer="go-muon", lr=0.02)
    assert train(config, tmp_path / "whole", data_dir=data_dir)
    assert not train(config, tmp_path / "cut", data_dir=data_dir, stop=stop_after(4))
    assert train(config, tmp_path / "cut", data_dir=data_dir)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert (whole / METRICS).read_bytes() == (cut / METRICS).read_bytes()
    run = load_run(whole)
    evaluated = [line["step"] for line in run.metrics if "validation_loss" in line]
    assert evaluated == [5, 10]
    assert run.result is not None
    assert run.result["validation_loss"] == run.metrics[-1]["validation_loss"]
    assert loss_statistic(task) == HELD_OUT


@pytest.mark.parametrize("task", NEW)
def test_arms_of_a_seed_share_everything_and_seeds_do_not(task: str, data_dir: Path) -> None:
    def hashes(**changes: object) -> dict[str, str]:
        made = tasks.build(tiny(task, **changes), data_dir)
        return pairing.hashes(made, tasks.build_model(made))

    ours = hashes(optimizer="go-muon")
    assert ours == hashes(optimizer="adamw", lr=0.5)
    other = hashes(seed=1)
    assert ours["stream"] != other["stream"]
    assert (ours["model"], ours["schedule"]) == (other["model"], other["schedule"])
    if task != "regression":  # it starts from W = 0, and its problem is drawn from the seed
        assert ours["parameters"] != other["parameters"]
    else:
        assert ours["corpus"] != other["corpus"]


def test_ptb_is_trained_as_in_the_paper_and_judged_by_its_own_validation_text(
    data_dir: Path,
) -> None:
    plain = tasks.build(tiny("ptb"), data_dir)
    task = HeldOutTextTask(tiny("ptb-validation"), data_dir)
    model = task.model()
    for step in (1, 7):
        assert task.loss(model, step)[0].item() == plain.loss(model, step)[0].item()
    assert pairing.hash_parameters(model) == pairing.hash_parameters(plain.model())
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(c) for c in "over the lazy fox\n" * 20])
    losses = [
        F.cross_entropy(model(text[None, i : i + 8])[0], text[i + 1 : i + 9])
        for i in range(0, len(text) - 8, 8)
    ]
    expected = torch.stack(losses).mean().item()
    assert task.evaluate(model, 5) == {"validation_loss": pytest.approx(expected)}
    assert task.evaluate(model, 4) == {}


def test_shakespeares_last_tenth_is_held_out(data_dir: Path) -> None:
    text = HeldOutTextTask(tiny("gpt-validation"), data_dir).text
    assert len(text.validation) == len(TEXT) // 10
    whole = torch.cat([text.train, text.validation])
    assert torch.equal(whole, corpora.load("shakespeare", data_dir).tokens)
    assert text.offsets.max().item() + 8 < len(text.train)
    with pytest.raises(LabError, match="shorter text has 132 characters"):
        HeldOutTextTask(tiny("gpt-validation", length=132), data_dir)


def test_a_validation_text_with_symbols_of_its_own_is_refused(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus_on_disk(data_dir, monkeypatch)
    strange = corpus_on_disk(tmp_path / "strange", monkeypatch, "fox #1\n" * 20, "ptb-valid")
    (data_dir / "made/strange.txt").write_text((strange / "made/input.txt").read_text())
    facts = {**vars(corpora.CORPORA["ptb-valid"]), "path": "made/strange.txt"}
    monkeypatch.setitem(corpora.CORPORA, "ptb-valid", corpora.Source(**facts))
    with pytest.raises(LabError, match="ptb-valid has '#', which ptb never has"):
        HeldOutTextTask(tiny("ptb-validation"), data_dir)


def test_each_row_goes_through_its_two_experts() -> None:
    torch.manual_seed(0)
    layer = ExpertLayer(6, 5)
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 4, 6)
    out, imbalance = layer(x)
    used = torch.zeros(EXPERTS)
    for row, answer in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        shares = layer.router(row).softmax(0)
        best = shares.argsort(descending=True)[:CHOSEN].tolist()
        used[best] += 1
        expected = torch.zeros(6)
        for expert in best:
            up, down = layer.experts.up_proj[expert], layer.experts.down_proj[expert]
            expected += shares[expert] / shares[best].sum() * (down @ F.gelu(up @ row))
        torch.testing.assert_close(answer, expected)
    mean = layer.router(x.flatten(0, 1)).softmax(-1).mean(0)
    balance = EXPERTS * ((used / used.sum()) * mean).sum()
    assert imbalance.item() == pytest.approx(balance.item())


def test_every_expert_is_a_matrix_of_its_own(data_dir: Path) -> None:
    task = ExpertMixtureTask(tiny("experts"), data_dir)
    model = task.model()
    table = str(GoMuon(model, lr=0.02).routing_table())
    assert table.count("8 experts") == 2
    loss, extra = task.loss(model, 1)
    windows = task.text.batch(1)
    logits, imbalance = model(windows[:, :-1])
    plain = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(plain.item() + BALANCE * imbalance.item())
    assert extra == {"imbalance": imbalance.item()}


def test_lora_starts_at_the_base_and_trains_only_adapters_and_classifier(data_dir: Path) -> None:
    task = DigitsLoRATask(tiny("digits-lora", width=32, hidden=64, batch=64))
    model, base = task.model(), task.upright.model()
    base.load_state_dict(task._pretrain())
    pictures, labels = task.upright.test
    torch.testing.assert_close(model(pictures), base(pictures))
    right = (model(pictures).argmax(1) == labels).double().mean().item()
    turned = task.evaluate(model, 5)["test_accuracy"]
    assert right > turned + 0.1, "the base knows upright digits, not turned and inverted ones"
    trained = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    adapted = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    assert len(adapted) == 4, "qkv, out, up and down of its one block"
    pairs = {f"{name}.{part}" for name in adapted for part in ("reduce", "expand")}
    assert trained == {"head", *pairs}


def test_a_base_comes_from_the_cache_and_a_damaged_file_is_made_again(data_dir: Path) -> None:
    calls: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(torch.get_num_threads())
        return {"weight": torch.arange(3.0)}

    before = torch.get_num_threads()
    for facts in ({"seed": 1}, {"seed": 1}, {"seed": 2}):
        found = pretrained.cached(facts, 1, make)
        assert torch.equal(found["weight"], torch.arange(3.0))
    assert calls == [1, 1]
    assert torch.get_num_threads() == before
    for path in pretrained.cache_folder().iterdir():
        path.write_bytes(b"damaged")
    pretrained.cached({"seed": 1}, 1, make)
    assert len(calls) == 3


def test_without_a_cache_the_base_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(pretrained, "cache_folder", lambda: tmp_path / "file" / "cache")
    found = pretrained.cached({}, 1, lambda: {"weight": torch.ones(2)})
    assert torch.equal(found["weight"], torch.ones(2))


def regression(**changes: object) -> RegressionTask:
    return RegressionTask(tiny("regression", width=16, hidden=8, batch=20_000, **changes))


def test_the_regressions_hessian_has_the_stated_condition_number() -> None:
    task = regression()
    for root, condition in (
        (task.input_root, INPUT_CONDITION),
        (task.output_root, OUTPUT_CONDITION),
    ):
        values = torch.linalg.eigvalsh(root @ root)
        assert (values[-1] / values[0]).item() == pytest.approx(condition, rel=1e-6)
        assert values.mean().item() == pytest.approx(1.0)


def test_the_regressions_optimum_and_excess_are_those_of_its_examples() -> None:
    task = regression()
    model = task.model()
    assert isinstance(model, LinearMap)
    start, _ = task.loss(model, 1)
    excess = task.evaluate(model, 5)["validation_loss"]
    # Every direction holds an equal part, ½·signal in the mean; the noise adds ½ everywhere.
    assert excess == pytest.approx(SIGNAL / 2, rel=0.3)
    assert start.item() == pytest.approx(0.5 + excess, rel=0.02)
    with torch.no_grad():
        model.map.weight.copy_(task.solution)
    best, _ = task.loss(model, 1)
    assert best.item() == pytest.approx(0.5, rel=0.02)
    assert task.evaluate(model, 5)["validation_loss"] < 1e-9
    x, y = task.examples(1)
    assert torch.equal(x, task.examples(1)[0])
    moments = x.double().mT @ x.double() / len(x)
    torch.testing.assert_close(moments, task.input_root @ task.input_root, atol=0.15, rtol=0.1)
    delta = (model(x) - y).double() @ task.output_root @ task.output_root
    precision = task.output_root @ task.output_root
    torch.testing.assert_close(delta.mT @ delta / len(x), precision, atol=0.15, rtol=0.1)
