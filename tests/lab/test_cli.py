"""The command line: what it prints, what it refuses, how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gomuon.__main__
from gomuon.lab import cli
from gomuon.lab.campaign_commands import jobs_and_threads
from gomuon.lab.data import corpora
from gomuon.lab.experiments import catalogue, racing
from gomuon.lab.report.terminal_summary import titled
from gomuon.lab.results.runs import METRICS, load_run
from gomuon.lab.running import execution, timing
from gomuon.lab.running.training import train
from tests.lab.helpers.commands import TINY, refused
from tests.lab.helpers.tiny_runs import addition

RACE = ["race", "--optimizers", "go-muon,adamw", "--seeds", "0", "--jobs", "2", *TINY]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("race --task groking", "unknown task 'groking'; did you mean 'grokking'?"),
        ("race --optimizers go-muon,adam", "unknown optimizer 'adam'; did you mean 'adamw'?"),
        ("race --optimizers zzz", "known: "),
        ("race --steps -5", "--steps must be at least 1, not -5"),
        ("race --jobs 0", "--jobs must be at least 1, not 0"),
        ("race --threads 0", "--threads must be at least 1, not 0"),
        ("race --width 30", "width (30) must be a multiple"),
        ("race --modulus 1", "modulus must be at least 2, not 1"),
        ("race --lr go-muon=fast", "'fast' is not a number"),
        ("race --adamw-lr -1", "adamw_lr must be a positive number, not -1.0"),
        ("race --seeds x", "--seeds 'x' is not understood"),
        ("race --seeds 99999999999999999999", "seeds are between 0 and 18446744073709551615"),
        ("race --seeds 18446744073709551615-18446744073709551616", "616 is too large"),
        (f"race --seeds {'9' * 5000}", "is too large"),
        ("reproduce pbt", "unknown experiment 'pbt'; did you mean 'ptb'?"),
        ("reproduce ptb --steps 0", "--steps must be at least 1, not 0"),
        ("data shakespear", "unknown corpus 'shakespear'; did you mean 'shakespeare'?"),
        ("report nowhere", "nowhere"),
        ("dance", "unknown command 'dance'"),
        ("rase", "unknown command 'rase'; did you mean 'race'?"),
        ("reprodcue ptb", "unknown command 'reprodcue'; did you mean 'reproduce'?"),
        ("race --optimizers=", "--optimizers is empty"),
        ("race --optimizers ,", "--optimizers is empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, words: str, refused_without_a_trace: Callable[[str], str]
) -> None:
    assert words in refused_without_a_trace(arguments)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gomuon {gomuon.__version__}\n"


def test_every_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The list that suggestions are made from is that of the help."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(command.__name__ in text for command in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["methods", "--markdown"], ["methods"], ["--help"]])
def test_a_reader_that_stops_gets_no_traceback(arguments: list[str]) -> None:
    """As with `gomuon methods | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gomuon", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything is written
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) != 0


def test_a_short_race_is_labelled() -> None:
    short = racing.race_plan("grokking", "go-muon,adamw", steps=60)
    assert short.label == "quick"
    assert titled(short).endswith("(QUICK: 60 updates)")
    for steps in (None, 350, 400):
        whole = racing.race_plan("grokking", "go-muon,adamw", steps=steps)
        assert whole.label == "full"
        assert titled(whole) == whole.title


def test_a_read_only_folder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the kernel's answer is made up where the test runs as root.
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != tmp_path and real(p, mode))
    assert "read-only" in refused([*RACE, "--out", str(tmp_path)], capsys)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot write" in refused([*RACE, "--out", str(blocked / "out")], capsys)
    assert "cannot write" in refused([*RACE, "--out", str(blocked)], capsys)


def test_a_folder_that_is_no_campaign_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert str(tmp_path) in refused(["report", str(tmp_path)], capsys)


def test_a_truncated_metrics_line_is_named_by_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(addition(), tmp_path)
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes()[:-5])
    assert "metrics.jsonl, line 12: truncated" in refused(["report", str(tmp_path)], capsys)


def test_help_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    said = re.sub(r"[\s│]", "", capsys.readouterr().out)  # names may be broken at the frame
    names = [*catalogue.EXPERIMENTS, *catalogue.OPEN_QUESTIONS]
    assert {"preset-gpt", "blocks-ptb", "state-ptb"} <= set(names)
    assert f"{','.join(catalogue.EXPERIMENTS)},orall" in said
    assert f"{','.join(catalogue.OPEN_QUESTIONS)}." in said


@pytest.mark.parametrize("arguments", ["race --steps many", "reproduce", "race --nothing"])
def test_what_cannot_be_parsed_exits_with_2(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["race", "tune", "reproduce", "report", "data", "methods", "bench"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "default: None" not in text
    assert "{None}" not in text


def test_data_fetches_only_what_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []
    monkeypatch.setattr(corpora, "fetch", lambda names, folder: fetched.append(list(names)))
    monkeypatch.setenv("GOMUON_DATA", str(tmp_path))
    for words in ([], ["ptb"], ["--fetch"]):
        assert cli.main(["data", *words]) == 0
    assert fetched == [["ptb"], list(corpora.CORPORA)]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall("^gomuon data.*", readme, re.MULTILINE)
    assert shown.split("#")[0].split() == ["gomuon", "data", "--fetch"]


def test_a_race_from_start_to_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = tmp_path / "demo"
    arguments = [*RACE, "--steps", "12", "--lr", "adamw=.02", "--out", str(out)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "[0/2] go-muon-s0  started" in text
    assert re.search(r"\[2/2\] \S+  finished  loss \d\.\d{4}  train [\d.]+%  held out", text)
    assert "Go-MUON 0.08" in text
    assert "AdamW 0.02" in text
    assert "\x1b" not in text
    assert (out / "report.html").stat().st_size > 1000
    assert (out / "report.md").exists()
    plan = json.loads((out / execution.PLAN).read_text())
    assert plan["threads"] == 1
    assert load_run(out / "runs" / "adamw-s0").config.lr == 0.02

    assert cli.main(arguments) == 0
    assert "adamw-s0  finished before" in capsys.readouterr().out
    assert "arms there: {'lr': 0.02" in refused([*arguments, "--lr", "adamw=.03"], capsys)
    assert cli.main(["report", str(out)]) == 0


def test_a_race_whose_arm_diverges_is_timed_and_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*RACE, "--steps", "4", "--lr", "go-muon=1e30", "--timing", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "go-muon is not timed: it diverged at update" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / execution.TIMING).read_text())["arms"] == ["adamw"]


def test_a_campaign_keeps_the_threads_it_was_begun_with(tmp_path: Path) -> None:
    assert jobs_and_threads(4, jobs=2, threads=3, folder=tmp_path) == (2, 3)
    (tmp_path / execution.PLAN).write_text('{"threads": 5}')
    assert jobs_and_threads(4, jobs=2, threads=None, folder=tmp_path) == (2, 5)
    assert jobs_and_threads(4, jobs=2, threads=1, folder=tmp_path) == (2, 1)


def test_dry_run_prints_the_plan_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "seconds_per_update", lambda config, data_dir: 0.36)
    assert cli.main(["reproduce", "grokking", "--dry-run", "--jobs", "2", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "p103" not in text  # people read titles, folders carry slugs
    assert "Go-MUON 0.08" in text
    assert "modulus=107" in text
    assert "0.360" in text
    assert "2 h 00 min with 2 jobs of 1 threads" in text
    assert not list(tmp_path.iterdir())


def test_quick_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "seconds_per_update", lambda config, data_dir: 0.1)
    assert cli.main(["reproduce", "grokking", "--dry-run", "--quick"]) == 0
    assert "QUICK" in capsys.readouterr().out


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}


def test_ctrl_c_stops_cleanly_and_the_same_command_continues(tmp_path: Path) -> None:
    arguments = [*RACE, "--steps", "1000", "--out", "out"]
    command = [sys.executable, "-m", "gomuon", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    folders = [tmp_path / "out" / "runs" / name for name in ("go-muon-s0", "adamw-s0")]
    deadline = time.monotonic() + 60
    while not all((f / METRICS).exists() and (f / METRICS).stat().st_size for f in folders):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().endswith(f"continue with: gomuon {' '.join(arguments)}")
    assert "Traceback" not in out + err
    made = [len(load_run(folder).metrics) for folder in folders]
    assert 0 < min(made) < 1000
    for folder, count in zip(folders, made, strict=True):
        if count < 1000:
            # It stopped with a checkpoint of its very last update.
            before = (folder / METRICS).read_bytes()
            assert train(load_run(folder).config, folder)
            assert (folder / METRICS).read_bytes().startswith(before)
            assert load_run(folder).finished


def test_a_missing_extra_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "gomuon.lab.cli")
    monkeypatch.delattr(gomuon.lab, "cli")
    assert gomuon.__main__.main() == 2
    assert 'pip install "gomuon[lab]"' in capsys.readouterr().err
