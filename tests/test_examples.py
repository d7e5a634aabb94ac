"""The examples that train on one process: they learn, and go on exactly after an interruption."""

import functools
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.integrations  # noqa: F401  nothing may be fetched; torchvision can be imported

EXAMPLES = Path(__file__).parents[1] / "examples"
WHY = "in the test extra: pip install '.[test]'"
TINY_GPT = [
    *("--width=32", "--layers=2", "--heads=2", "--context=16", "--batch=8", "--lr=3e-3"),
    *("--steps=40", "--warmup=5", "--log_every=1", "--eval_every=20", "--eval_batches=2"),
]
TINY_TRAINER = [
    *("--steps=12", "--batch=4", "--accumulate=2", "--length=32", "--save_every=6", "--lr=3e-3")
]
TINY_IMAGE = ["--epochs=2", "--batch=256", "--size=16", "--lr=3e-3"]


def example(name: str) -> Any:
    """The example as a module of its own, read again for each test."""
    described = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[module.__name__] = module  # dataclasses look it up
    described.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Examples leave nothing behind: neither threads nor the state of random numbers."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def train_gpt(out: Path, *more: str, module: ModuleType | None = None) -> tuple[list[float], float]:
    """Losses of all updates, and the last one on held-out text."""
    (module or example("train_gpt")).main([*TINY_GPT, f"--out={out}", *more])
    return logged(out)


def logged(out: Path) -> tuple[list[float], float]:
    """The same from the log of train_gpt.py."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return losses, [line["validation"] for line in lines if "validation" in line][-1]


def tensors(entry: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor in nested dicts and lists, by its path."""
    if isinstance(entry, Tensor):
        return {name: entry}
    pairs = entry.items() if isinstance(entry, dict) else enumerate(entry)
    inner = [(f"{name}/{key}", one) for key, one in pairs if isinstance(one, dict | list | Tensor)]
    return {path: tensor for key, one in inner for path, tensor in tensors(one, key).items()}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Weights and the optimizer's state are equal to the bit."""
    first, second = (tensors(torch.load(path, weights_only=True)) for path in (one, other))
    assert first.keys() == second.keys()
    assert any(name.startswith("/optimizer/state") for name in first)
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing


# ---- train_gpt.py --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer=gomuon"],
        ["--optimizer=gomuon", "--matrix_lr=0.02"],
        ["--optimizer=muon"],
        ["--optimizer=muon", "--matrix_lr=0.02"],
        ["--optimizer=adamw"],
    ],
    ids=["gomuon", "gomuon, paper's scale", "muon", "muon, paper's scale", "adamw"],
)
def test_train_gpt_learns(options: list[str], tmp_path: Path) -> None:
    losses, validation = train_gpt(tmp_path, *options)
    assert len(losses) == 40
    assert losses[0] > 4.0  # as good as chance among a hundred symbols
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    assert validation < losses[0] - 0.8


@pytest.mark.parametrize("optimizer", ["gomuon", "adamw"])
def test_train_gpt_resumes_to_the_bit(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"--optimizer={optimizer}", "--steps=10", "--eval_every=6"]
    whole, validation = train_gpt(tmp_path / "whole", *options)
    stopped = example("train_gpt")
    usual = stopped.rate_factor

    def until_nine(step: int, config: Any) -> Any:
        if step == 9:
            raise KeyboardInterrupt
        return usual(step, config)

    monkeypatch.setattr(stopped, "rate_factor", until_nine)
    with pytest.raises(KeyboardInterrupt):
        train_gpt(tmp_path / "parts", *options, module=stopped)
    losses, again = train_gpt(tmp_path / "parts", *options, "--resume")
    assert losses[:6] + losses[-4:] == whole  # updates 7 and 8 were made twice
    assert again == validation
    assert_same_checkpoint(tmp_path / "whole/checkpoint.pt", tmp_path / "parts/checkpoint.pt")


def test_train_gpt_accumulates(tmp_path: Path) -> None:
    whole, _ = train_gpt(tmp_path / "whole", "--steps=6")
    halves, _ = train_gpt(tmp_path / "halves", "--steps=6", "--accumulate=2")
    assert halves == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_train_gpt_compiled_is_train_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, _ = train_gpt(tmp_path / "eager", "--steps=6")
    without_compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", without_compiler)
    compiled, _ = train_gpt(tmp_path / "compiled", "--steps=6", "--compile")
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_train_gpt_reads_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three, four five six.\n" * 200)
    losses, _ = train_gpt(tmp_path / "out", f"--data={text}", "--steps=2")
    assert losses[0] < 3.2  # chance among its 16 symbols is 2.8


def test_train_gpt_names_a_batch_that_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--batch must be a multiple"):
        train_gpt(tmp_path, "--accumulate=3")


# ---- finetune_trainer.py -------------------------------------------------------------------------


def trainer(out: Path, *more: str) -> list[float]:
    """The losses that the Trainer logged."""
    pytest.importorskip("accelerate", reason=WHY, exc_type=ModuleNotFoundError)
    pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)
    example("finetune_trainer").main([*TINY_TRAINER, f"--out={out}", *more])
    history = json.loads((out / "checkpoint-12/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
def test_finetune_trainer_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    losses = trainer(tmp_path / "whole")
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    shutil.copytree(tmp_path / "whole/checkpoint-6", tmp_path / "parts/checkpoint-6")
    assert trainer(tmp_path / "parts", "--resume") == losses
    weights = [(tmp_path / part / "model.safetensors").read_bytes() for part in ("whole", "parts")]
    assert weights[0] == weights[1]


def saved_model(folder: Path) -> Path:
    """A model with its tokenizer in a folder, as one fetches them."""
    transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)
    tokenizers = pytest.importorskip("tokenizers", reason=WHY, exc_type=ModuleNotFoundError)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["one two three four"], vocab_size=280)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    fast.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=280, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_finetune_trainer_takes_a_saved_model_and_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason=WHY, exc_type=ModuleNotFoundError)
    given = saved_model(tmp_path / "given")
    before = (given / "model.safetensors").read_bytes()
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    more = [f"--model={given}", f"--data={text}", "--lora", "--lr=0.03"]
    losses = trainer(tmp_path / "out", *more)
    assert losses[-1] < losses[0] - 0.3
    assert (given / "model.safetensors").read_bytes() == before
    assert (tmp_path / "out/adapter_model.safetensors").exists()
    assert not (tmp_path / "out/model.safetensors").exists()


# ---- image.py ------------------------------------------------------------------------------------


def train_image(
    out: Path, *more: str, capsys: pytest.CaptureFixture[str], module: ModuleType | None = None
) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch."""
    (module or example("image")).main([*TINY_IMAGE, f"--out={out}", *more])
    return epochs_in(capsys.readouterr().out)


def epochs_in(printed: str) -> dict[int, tuple[float, float]]:
    lines = re.findall(r"^epoch (\d+)  loss ([\d.]+)  accuracy ([\d.]+)$", printed, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in lines}


@pytest.mark.slow
def test_image_learns_and_resumes_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("timm", "sklearn"):
        pytest.importorskip(package, reason=WHY, exc_type=ModuleNotFoundError)
    whole = train_image(tmp_path / "whole", capsys=capsys)
    assert whole[2][0] < whole[1][0] - 0.2
    stopped = example("image")
    usual, calls = stopped.validate, []

    def once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return usual(*given)

    monkeypatch.setattr(stopped, "validate", once)
    with pytest.raises(KeyboardInterrupt):
        train_image(tmp_path / "parts", capsys=capsys, module=stopped)
    assert epochs_in(capsys.readouterr().out) == {1: whole[1]}
    assert train_image(tmp_path / "parts", "--resume", capsys=capsys) == {2: whole[2]}
    assert_same_checkpoint(tmp_path / "whole/checkpoint.pt", tmp_path / "parts/checkpoint.pt")


def test_image_reads_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm", reason=WHY, exc_type=ModuleNotFoundError)
    image = pytest.importorskip("PIL.Image", reason=WHY, exc_type=ModuleNotFoundError)
    for split, count in (("train", 8), ("val", 4)):
        for colour in ("red", "blue", "green"):
            (folder := tmp_path / split / colour).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (40, 40), colour).save(folder / f"{number}.png")
    more = [f"--data={tmp_path}", "--batch=8", "--epochs=1"]
    found = train_image(tmp_path / "out", *more, capsys=capsys)
    assert list(found) == [1]
    saved = torch.load(tmp_path / "out/checkpoint.pt", weights_only=True)
    assert saved["model"]["fc.weight"].shape[0] == 3
