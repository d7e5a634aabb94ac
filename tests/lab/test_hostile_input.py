"""Empty values, absurd numbers, forged files and strange names give one line, no traceback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import cli, machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import tasks
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.experiments.selection import read_selection
from gomuon.lab.files import read_json, read_json_lines, write_json
from gomuon.lab.report.writing import write_report
from gomuon.lab.results.runs import MANIFEST, load_run
from gomuon.lab.running.training import train
from tests.lab.helpers.commands import TINY, refused
from tests.lab.helpers.made_bench import made_result
from tests.lab.helpers.made_campaigns import race, write_campaign
from tests.lab.helpers.reports import edit_json
from tests.lab.helpers.tiny_runs import addition

RED = "\x1b[31mred\x1b[0m"
SMALL = [*TINY, "--optimizers", "adamw", "--steps", "2", "--jobs", "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["race", flag, ""] for flag in ("--task", "--optimizers", "--lr", "--seeds", "--out")),
        ["race", "--options", ""],
        *(["tune", flag, " "] for flag in ("--optimizers", "--rates", "--momenta", "--seeds")),
        *(["bench", flag, ""] for flag in ("--models", "--arms", "--out")),
        *(["plan", flag, ""] for flag in ("--model", "--input", "--optimizers")),
        ["reproduce", "grokking", "--seeds", ""],
        ["race", "--selection", ""],
        ["race", "--data-dir", ""],
        ["verify", "--device", ""],
        ["race", "--optimizers="],
    ],
)
def test_an_empty_value_is_not_taken_for_all_of_them(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = next(word for word in reversed(arguments) if word.startswith("--")).removesuffix("=")
    assert f"{flag} is empty; give it a value, or leave it out" in refused(arguments, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["report", "reproduce", "data", "methods", "plan"])
def test_an_empty_word_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "an argument is empty" in refused([command, ""], capsys)


@pytest.mark.parametrize(
    "arguments", [["race", "--lr", ","], ["tune", "--rates", ", ,"], ["tune", "--momenta", ","]]
)
def test_commas_alone_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused([*arguments, *SMALL, "--out", str(tmp_path / "out")], capsys)
    assert f"{arguments[1]} {arguments[2]!r} has no value" in said


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--task", "x" * 300 + ".py:Thing", "there is no such file"),
        ("--task", "\0.py:Thing", "there is no such file"),
        ("--task", ":", "is not understood; write module:Class or path/to/file.py:Class"),
        ("--task", "broken.py:Task", "cannot be imported: SyntaxError"),
        ("--task", "leaving.py:Task", "cannot be imported: SystemExit"),
        ("--task", "json.py:Task", "another module is named 'json'; give the file another name"),
        ("--task", "empty.py:Task", "empty.py has no class 'Task', nor any other"),
        ("--optimizers", f"a{RED}:Thing", "cannot be imported"),
        ("--optimizers", "torch.optim:Sgd", "did you mean 'SGD'?"),
        ("--optimizers", "torch.nn:Linear", "is no optimizer; expected a class derived from torch"),
        ("--options", "adamw.eps=" + "[" * 300, "is not understood"),
        ("--options", "adamw.nothing=1", "invalid settings of optimizer 'adamw'"),
        ("--options", "adamw.amsgrad={1: 2}", "is not a finite number, a text, True, False, None"),
    ],
)
def test_what_comes_from_outside_is_refused_before_anything_is_written(
    flag: str,
    value: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = {"broken": "def", "leaving": "raise SystemExit(3)", "json": "", "empty": ""}
    for name, source in sources.items():
        Path(f"{name}.py").write_text(source)
    assert words in refused(["race", *SMALL, flag, value], capsys)
    assert not list(tmp_path.glob("runs"))


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        *((f"--{name}", "-8", f"{name} must be at least 1, not -8") for name in ("width", "heads")),
        ("--layers", "0", "layers must be at least 1, not 0"),
        ("--hidden", "-1", "hidden must be at least 1, not -1"),
        ("--modulus", "100000", "modulus must be at most 1,000, not 100000"),
        ("--modulus", "-3", "modulus must be at least 0, not -3"),
        ("--width", "9" * 30, "width must be at most 16,384, not 999"),
        ("--layers", "9" * 400, "layers must be at most"),
        ("--steps", "9" * 400, "--steps must be at most 10,000,000, not 999"),
        ("--threads", "1000000000", "--threads must be at most 1,024, not 1000000000"),
        ("--jobs", "9" * 30, "--jobs must be at most 1,024"),
        ("--adamw-lr", "nan", "adamw_lr must be a positive number, not nan"),
        ("--adamw-lr", "inf", "adamw_lr must be a positive number, not inf"),
        ("--out", "x" * 300, "File name too long"),
        ("--data-dir", "x" * 300, "is not a folder"),
        ("--selection", "x" * 300, "File name too long"),
    ],
)
def test_an_absurd_value_of_a_race_is_refused(
    flag: str,
    value: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    task = ["--task", "ptb"] if flag == "--data-dir" else []
    assert words in refused(["race", *SMALL, *task, flag, value], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tune --grid 1000000000", "--grid must be at most 10,000, not 1000000000"),
        (f"reproduce grokking --steps {'9' * 400}", "--steps must be at most 10,000,000"),
        ("bench --cycles 1000000000", "--cycles must be at most 10,000"),
        ("bench --threads 1000000000", "--threads must be at most 1,024"),
        ("verify --seeds 1000000000", "--seeds must be at most 1,000"),
        ("plan character --ranks 1000000000", "--ranks must be at most 1,000,000"),
        (f"plan character --tokens {'9' * 400}", "--tokens must be at most 1,000,000,000,000"),
        (f"plan --model torch.nn:Identity --input {'9' * 30}", "without parameters"),
        (
            f"plan --model tests.lab.test_hostile_input:linear --input {'9' * 30}",
            "fails on an input",
        ),
        ("plan --model .:x", "cannot be imported"),
        (f"report {'x' * 300}", "neither a campaign nor a run"),
        (f"bench --page --out {'x' * 300}", "does not exist"),
    ],
)
def test_absurd_values_of_the_other_commands_are_refused(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(arguments.split(), capsys)


def linear() -> Any:
    """For `gomuon plan --model`."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = addition(width=16_384, layers=1000, heads=2, hidden=65_536)
    with pytest.raises(LabError, match=r"would need more than [\d,]+ GB of memory"):
        tasks.build(config)
    small = tasks.least_bytes(addition())
    monkeypatch.setattr(machine, "memory", lambda: small - 1)
    with pytest.raises(LabError, match="of memory"):
        tasks.build(addition())
    monkeypatch.setattr(machine, "memory", lambda: small)
    tasks.build(addition())


KINDS: list[dict[str, Any]] = [
    *({name: "8"} for name in ("width", "steps", "lr", "seed", "telemetry")),
    *({"steps": value} for value in (True, 1.5, None)),
    *({"seed": value} for value in (True, 1.5, None)),
    *({"task": 3}, {"optimizer": None}, {"arm": 1}, {"options": "x"}, {"label": 1}),
    {"lr": 10**400},
]


@pytest.mark.parametrize("change", KINDS)
def test_a_configuration_of_wrong_kinds_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LabError, match=next(iter(change))):
        addition(**change)
    with pytest.raises(LabError, match="invalid configuration"):
        RunConfig.from_dict({**addition().as_dict(), **change}, tmp_path)


DEEP = ('{"a":' * 900 + "1" + "}" * 900, "[" * 100_000, '{"a":' * 100_000)


@pytest.mark.parametrize("text", DEEP)
def test_deep_nesting_is_no_valid_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(LabError, match=r"plan\.json is not valid JSON \(nested more than 50"):
        read_json(path)
    path.write_text(text + "\n")
    with pytest.raises(LabError, match=r"plan\.json, line 1: truncated or damaged"):
        read_json_lines(path, whole=True)


@pytest.mark.parametrize("name", ["plan.json", "timing.json", "runs/adamw-s0/manifest.json"])
def test_deep_files_of_a_campaign_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    (folder / name).write_text("[" * 100_000)
    assert f"{name} is not valid JSON" in refused(["report", str(folder)], capsys)


MANIFESTS: dict[str, list[Any]] = {
    "versions": [[], 3, "x", {"torch": []}, {"torch": {"a": 1}}],
    "machine": [[], True, {"cores": []}],
    "commit": [3, [], {}],
    "hashes": [{"corpus": []}, {"model": {}}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in MANIFESTS for value in MANIFESTS[field]]
)
def test_a_manifest_of_wrong_kinds_is_named(field: str, value: Any, tmp_path: Path) -> None:
    train(addition(), tmp_path)
    edit_json(tmp_path / MANIFEST, **{field: value})
    with pytest.raises(LabError, match=rf"{MANIFEST}: .*{field}"):
        load_run(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(LabError, match=MANIFEST):
        train(addition(), tmp_path)


FORGED: tuple[Any, ...] = (10**400, "x", [[1]], {})


@pytest.mark.parametrize(
    "name", ["plan.json", "timing.json", "runs/adamw-s0/result.json", "runs/adamw-s0/manifest.json"]
)
def test_a_report_of_forged_fields_ends_in_words(name: str, tmp_path: Path) -> None:
    """Every field of every file of a campaign, one by one."""
    folder = write_campaign(tmp_path / "c", race(("adamw",), steps=20))
    write_json(folder / "timing.json", {"arms": ["adamw"], "seconds": [[0.1, 0.2]]})
    path = folder / name
    whole = json.loads(path.read_text())
    for field in whole:
        for value in FORGED:
            edit_json(path, **{field: value})
            with contextlib.suppress(LabError):  # nothing else
                write_report(folder)
            edit_json(path, **{field: whole[field]})


def test_a_forged_benchmark_ends_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    whole = made_result(paper={"muon": 1.0})
    for field in whole:
        for value in FORGED:
            path.write_text(json.dumps({**whole, field: value}))
            assert cli.main(["bench", "--page", "--out", str(tmp_path)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


SELECTIONS: dict[str, list[Any]] = {
    "steps": [float("inf"), 10**400, "x", 0],
    "seeds": [[float("nan")], [[]], 3, [-1]],
    "settings": [{"width": "x"}, {"width": -8}, {"width": 10**9}, {"width": []}, {"width": True}],
    "methods": [{"adamw": {"rate": 10**400, "momentum": None}}],
    "task": ["groking"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in SELECTIONS for value in SELECTIONS[field]]
)
def test_a_forged_selection_is_named(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    whole = {
        "experiment": "tune",
        "format": 1,
        "task": "grokking",
        "seeds": [0],
        "steps": 5,
        "settings": {"width": 8, "heads": 2},
        "methods": {"adamw": {"rate": 0.1, "momentum": None}},
    }
    path.write_text(json.dumps(whole))
    assert read_selection(path).picked == {"adamw": (0.1, None)}
    path.write_text(json.dumps({**whole, field: value}))
    with pytest.raises(
        LabError, match=r"selection\.json is not a selection of gomuon tune or reproduce"
    ):
        read_selection(path)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["report", RED], ["report", f"a\r{RED}"], ["data", RED], ["methods", RED]),
        *(["race", "--task", RED], ["race", "--optimizers", RED], ["race", "--seeds", RED]),
        *(["race", "--steps", RED], ["race", f"--{RED}", "1"], [RED], ["race", RED, "--help"]),
        *(["plan", RED], ["plan", "--model", RED], ["verify", "--device", RED]),
        ["bench", "--arms", RED],
    ],
)
def test_escape_sequences_of_arguments_are_shown_and_not_obeyed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(arguments)
    except SystemExit as stopped:
        code = stopped.code or 0
    said = capsys.readouterr()
    assert not {"\x1b", "\r"} & set(said.out + said.err)
    assert code == (0 if "--help" in arguments else 2)
    assert code == 0 or "\\x1b[31m" in (said.out + said.err).replace("\n", "")


def test_escape_sequences_of_a_folder_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / RED
    assert cli.main(["race", *SMALL, "--out", RED]) == 0
    assert cli.main(["report", RED]) == 0
    made = made_result(paper={"muon": 1.0})
    made["workloads"]["paper"]["title"] = RED
    made["machine"]["processor"] = RED
    (folder / "bench.json").write_text(json.dumps(made))
    assert cli.main(["bench", "--page", "--out", RED]) == 0
    said = capsys.readouterr().out
    assert "report: \\x1b[31mred\\x1b[0m/report.html" in said
    assert "\x1b" not in said
    run = folder / "runs" / "adamw-s0" / MANIFEST
    edit_json(run, commit=[RED])
    assert "\x1b" not in refused(["report", RED], capsys)
    edit_json(folder / "plan.json", task=RED)
    assert "\x1b" not in refused(["race", *SMALL, "--out", RED], capsys)


def test_a_terminal_gets_our_colours_and_no_one_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("GOMUON_DATA", str(tmp_path / RED))
    (tmp_path / RED).mkdir()
    (tmp_path / RED / "input.txt").write_text("not Shakespeare")
    assert cli.main(["data"]) == 0
    said = capsys.readouterr().out
    assert "\x1b[" in said
    assert "\x1b[31m" not in said
    assert "\\x1b[31m" in said


def test_a_name_that_is_no_utf_8_can_be_printed_and_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    command = [sys.executable, "-m", "gomuon", "race", *SMALL, "--out", name]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"report: caf\udce9/report.html" in done.stdout
    write_json(tmp_path / "a.json", {"name": name})
    assert read_json(tmp_path / "a.json") == {"name": name}
