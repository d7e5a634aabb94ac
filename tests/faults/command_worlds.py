"""A folder with everything the commands read, and ways to damage it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gomuon.lab import cli
from gomuon.lab.bench import benchmark
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.results.runs import CHECKPOINT
from gomuon.lab.running.training import train
from tests.faults.command_lines import PLACES, RACE, SWEEP, words_of
from tests.lab.helpers.made_bench import made_result
from tests.lab.helpers.tiny_runs import TEXT

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\x1b[31mred",
        "\ud800",
    ),
    *([], {}, [1], {"a": 1}, [[[]]], "9" * 400, "x" * 5000, ["\x1b[2J"], {"\x1b]0;x\x07": 1}),
)
KINDS = (
    *("value", "value", "value", "checkpoint", "bytes", "cut", "link", "folder link", "gone"),
    *("directory", "deep", "name", "lock", "leftover", "pipe", "garbage"),
)
KEPT = tempfile.TemporaryDirectory(prefix="gomuon-faults-")


def small() -> nn.Module:
    """A model for `gomuon plan --model`."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def raising() -> nn.Module:
    raise SyntaxError("a\x1b[31mmodel\nthat cannot be made")


@functools.cache
def template() -> Path:
    """The undamaged world, made once in every process."""
    folder = Path(KEPT.name) / str(os.getpid())
    folder.mkdir()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        Path("data/made").mkdir(parents=True)
        Path("data/made/input.txt").write_text(TEXT)
        whole = words_of(RACE | {"--out": "campaign"})
        assert cli.main(["race", *whole, "--timing"]) == 0
        assert cli.main(["tune", *words_of(SWEEP)]) == 0
        shutil.copy("sweep/selection.json", "selection.json")
        begin()
        Path("bench").mkdir()
        torch.set_num_threads(1)
        made = made_result(mlp={"muon": 1.0}) | benchmark.environment("quick")
        Path("bench/bench.json").write_text(json.dumps(made))
        Path("garbage").write_bytes(bytes(range(256)))
        Path("deep.json").write_text("[" * 100_000)
        Path("page.md").write_text("# A page without markers\n")
        Path("closed").mkdir()
        os.mkfifo("pipe")
    return folder


def begin() -> None:
    """A campaign that was stopped after its first update, with a checkpoint."""
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) > 1

    assert cli.main(["race", *words_of(RACE)]) == 0
    run = Path("begun/runs/adamw-s0")
    config = json.loads((run / "manifest.json").read_text())["config"]
    shutil.rmtree(run)
    assert not train(RunConfig(**config), run, stop=stop)
    assert (run / CHECKPOINT).exists()


def damage(world: Path, outside: Path, generator: random.Random) -> None:
    """One thing in a folder is not as it was."""
    found = [p for p in everything(world) if not p.is_symlink() and not p.is_fifo()]
    files = [path for path in found if path.is_file()]
    if not files:
        return
    # What commands read most is damaged most.
    weighted = [p for p in files if p.suffix in (".json", ".jsonl", ".pt")] * 5 + files
    path = generator.choice(weighted)
    kind = generator.choice(KINDS)
    if kind == "value" and path.suffix == ".json":
        edit(path, generator)
    elif kind == "value" and path.suffix == ".jsonl":
        edit_line(path, generator)
    elif kind == "checkpoint":
        for checkpoint in (path for path in files if path.name == CHECKPOINT):
            forge(checkpoint, generator)
    elif kind == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(generator.randint(1, 20)):
            if content:
                content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: generator.randint(0, path.stat().st_size)])
    elif kind == "link":
        path.unlink()
        path.symlink_to(outside / "victim.json")
    elif kind == "folder link":
        # Not the folders that commands are given: those are the user's own.
        deep = [p for p in found if p.is_dir() and p.name not in PLACES]
        if deep:
            folder = generator.choice(deep)
            shutil.rmtree(folder)
            folder.symlink_to(outside / "victims", target_is_directory=True)
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    elif kind == "deep":
        path.write_text('{"a":' * 900 + "1" + "}" * 900 if generator.random() < 0.5 else "[" * 9999)
    elif kind == "name":
        folder = generator.choice([world, *(p for p in found if p.is_dir())])
        (folder / "\x1b[31mstranger\x1b[0m").mkdir(exist_ok=True)
    elif kind == "lock":
        folder = generator.choice([world, *(p for p in found if p.is_dir())])
        (folder / ".lock").unlink(missing_ok=True)
        (folder / ".lock").symlink_to(outside / "victim.json")
    elif kind == "leftover":
        leftover = path.parent / f".{path.name}.{os.getpid()}.part"
        leftover.unlink(missing_ok=True)
        leftover.symlink_to(outside / "victim.json")
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "garbage":
        path.write_bytes(generator.randbytes(200))
    else:
        path.unlink()


def everything(folder: Path) -> list[Path]:
    """All that is in a folder, through no link: damage must stay inside."""
    walk = os.walk(folder, followlinks=False)
    return sorted(Path(root) / name for root, dirs, files in walk for name in (*dirs, *files))


def edit(path: Path, generator: random.Random) -> None:
    """Another value somewhere in a JSON file."""
    with contextlib.suppress(ValueError, RecursionError):  # damaged before
        value = json.loads(path.read_text())
        path.write_text(json.dumps(changed(value, generator)))


def edit_line(path: Path, generator: random.Random) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # empty, or damaged before
        lines = path.read_text().splitlines()
        index = generator.randrange(len(lines))
        lines[index] = json.dumps(changed(json.loads(lines[index]), generator))
        path.write_text("".join(f"{line}\n" for line in lines))


def changed(value: Any, generator: random.Random) -> Any:
    """The value with a part of it replaced, removed or added."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(sorted(value))
        if generator.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: changed(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.7:
        index = generator.randrange(len(value))
        return [*value[:index], changed(value[index], generator), *value[index + 1 :]]
    return generator.choice(VALUES)


def forge(path: Path, generator: random.Random) -> None:
    """A checkpoint that can be read and does not fit."""
    if path.is_symlink():
        return
    try:
        state = torch.load(path, weights_only=True)
    except Exception:  # gone or damaged before
        return
    torch.save(_forged(state, generator), path)


def _forged(value: Any, generator: random.Random) -> Any:
    if isinstance(value, dict) and value and generator.random() < 0.95:
        key = generator.choice(list(value))
        if generator.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _forged(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.9:
        index = generator.randrange(len(value))
        return [*value[:index], _forged(value[index], generator), *value[index + 1 :]]
    tensors = (torch.zeros(3), torch.zeros(()), torch.zeros(0), torch.zeros(2, 2, dtype=torch.long))
    return generator.choice((*VALUES, *tensors))
