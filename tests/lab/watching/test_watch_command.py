"""`gomuon watch`: what stands out, in 80 columns and on a page that needs nothing else."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gomuon.integrations.json_lines import JsonLinesWriter
from gomuon.lab import cli
from gomuon.lab.errors import LabError
from gomuon.lab.terminal import SafeConsole
from gomuon.lab.watching import command
from gomuon.lab.watching.layer_views import DRIFTS, ILL, STARVED, RunView
from gomuon.lab.watching.watch_page import page
from gomuon.lab.watching.watch_terminal import common_prefix, large, ratio, screen, short, spark
from gomuon.watching.records import WatchRecord


def record(step: int, layer: str, **numbers: Any) -> WatchRecord:
    usual: dict[str, Any] = {
        "source_cosine": 0.5,
        "gradient_cosine": 0.4,
        "update_ratio": 0.02,
        "age": 1,
        "source_rank": 64.0,
        "source_spread": 40.0,
        "full_rank": 64,
        "weight_rank": 50.0,
        "input_condition": 120.0,
        "output_condition": 30.0,
        "input_raised": 0.0,
        "output_raised": 0.0,
        "drift": 1.25,
        "efficiency": 0.9,
        "efficiency_bound": 0.8,
    }
    fixed: dict[str, Any] = {
        "rank": 0,
        "method": "GoMuon",
        "matrices": 1,
        "rows": 64,
        "columns": 64,
    }
    return WatchRecord(step=step, layer=layer, covered=10, lr=0.08, **fixed, **(usual | numbers))


NAMES = [f"model.blocks.{i}.{part}.weight" for i in range(4) for part in ("attention.q", "mlp.up")]
BAD: dict[str, dict[str, Any]] = {
    NAMES[0]: {"efficiency": 0.3, "drift": 5.0},
    NAMES[1]: {"output_condition": 2e6},
    NAMES[2]: {"source_rank": 40.0},
    NAMES[3]: {"source_spread": 3.0},
    NAMES[4]: {"input_raised": 2.0},
}


def records(*, bad: bool = True) -> list[WatchRecord]:
    return [
        record(step, name, **(BAD.get(name, {}) if bad else {}))
        for step in (10, 20, 30)
        for name in NAMES
    ]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with JsonLinesWriter(path) as write:
        write(records())
    return path


def shown(run: RunView, **options: Any) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(run, Path("run.jsonl"), **options))
    return console.export_text()


def test_what_stands_out() -> None:
    run = RunView.of(records())
    assert [layer.name for layer in run.with_remark(DRIFTS)] == [NAMES[0]]
    assert [layer.name for layer in run.with_remark(ILL)] == [NAMES[1], NAMES[4]]
    assert [layer.name for layer in run.with_remark(STARVED)] == [NAMES[2], NAMES[3]]
    assert run.headline == "Of 8 layers 1 drifts, 2 are ill-conditioned, 2 are starved of rank"
    assert RunView.of(records(bad=False)).headline == "Nothing stands out in 8 layers"


def test_numbers_that_layers_take_turns_with_are_held() -> None:
    some = [record(10, "a", drift=2.0), record(10, "b", drift=None), record(20, "a", drift=None)]
    run = RunView.of([*some, record(20, "b", drift=4.0)])
    assert run.series(lambda r: r.drift) == [(10, [2.0]), (20, [2.0, 4.0])]
    assert [layer.drift for layer in run.layers] == [2.0, 4.0]


def test_the_terminal_view_fits_into_80_columns() -> None:
    text = shown(RunView.of(records()))
    assert max(map(len, text.splitlines())) <= 80
    assert "GoMuon, step 30, 8 layers" in text
    rows = [line for line in text.splitlines() if re.match(r"\d\.", line)]
    assert len(rows) == 8
    assert all(re.search(r" (D|I|R)\s*$", row) for row in rows[:5]), "those that stand out first"
    assert not any(re.search(r" (D|I|R)\s*$", row) for row in rows[5:])
    assert rows[0].split() == [
        "0.attention.q",
        "0.02",
        "0.40",
        "0.30",
        "0.20",
        "120",
        "30",
        "64/64",
        "D",
    ]


def test_a_low_terminal_shows_fewer_rows() -> None:
    text = shown(RunView.of(records()), height=18)
    assert "and 4 more" in text
    assert len(text.splitlines()) <= 18


def test_a_method_without_geometry_has_dashes() -> None:
    names = ("drift", "efficiency", "efficiency_bound", "input_condition", "output_condition")
    nothing = dict.fromkeys(names)
    run = RunView.of([record(10, "a.weight", **nothing, source_rank=None, source_spread=None)])
    row = next(line for line in shown(run).splitlines() if line.startswith("a "))
    assert row.split() == ["a", "0.02", "0.40", "–", "–", "–", "–", "–"]
    assert page(run, Path("x")).count("<figure>") == 3  # rate, cosines and rank of the weights


def test_the_page_needs_nothing_else(run_file: Path) -> None:
    text = page(command.read_run(run_file), run_file)
    assert text.startswith("<!doctype html>")
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme:dark" in text
    assert text.count("<figure>") == 5
    for words in ("Of 8 layers 1 drifts", "Drifts", "Ill-conditioned", "Starved of rank"):
        assert words in text
    calm = page(RunView.of(records(bad=False)), run_file)
    assert "<h2>Drifts" not in calm


def test_names_cannot_become_markup() -> None:
    text = page(RunView.of([record(10, "<script>alert(1)</script>")]), Path("x"))
    assert "<script" not in text


def test_the_command_prints_and_writes(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    assert cli.main(["watch", str(run_file), "--page", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Of 8 layers" in printed
    assert str(out) in printed.replace("\n", "")
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("", "has no record yet"),
        ("hello\n", "line 1 of .* is no record of JsonLinesWriter"),
        ("[" * 100_000 + "\n", "line 1 of .* is no record of JsonLinesWriter"),
        ('{"step": true}\n', "step must be int, got True"),
        ('{"layer": 3}\n', "layer must be str, got 3"),
        ('{"drift": NaN}\n', "drift must be float . None, got nan"),
        ('{"age": 1' + "0" * 99 + "}\n", "age must be int . None, got a whole number of 329 bits"),
    ],
)
def test_a_file_without_records_is_refused(
    tmp_path: Path, content: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LabError, match=says):
        command.read_run(path)
    assert cli.main(["watch", str(path)]) == 2
    assert "gomuon: " in capsys.readouterr().err


def test_bytes_that_are_no_text_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(bytes(range(256)))
    with pytest.raises(LabError, match="is no record"):
        command.read_run(tmp_path / "garbage")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LabError, match="not a regular file"):
        command.read_run(tmp_path / "pipe")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is a folder"):
        command.read_run(tmp_path)


def test_the_live_view_follows_the_file(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows what is added, and ends with Ctrl-C, which writes the page."""
    steps: list[int] = []
    looks = iter(range(4))

    def sleep(seconds: float) -> None:
        look = next(looks)
        if look == 1:
            with JsonLinesWriter(run_file) as write:
                write([replace(one, step=40) for one in records()[:8]])
        if look == 3:
            raise KeyboardInterrupt

    def kept(run: RunView, *rest: Any) -> Any:
        steps.append(run.step)
        return screen(run, *rest)

    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command, "screen", kept)
    console = SafeConsole(force_terminal=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    out = tmp_path / "out.html"
    command._follow(command.read_run(run_file), run_file, out, 0.1, console)
    assert steps == [30, 40]
    assert "steps 10 to 40" in out.read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (54.3, "54"), (999.4, "999"), (1234.0, "1.2k"), (65536.0, "65.5k"),
     (3.2e5, "320k"), (2e6, "2.0M"), (5e9, "5e09"), (None, "–")],
)  # fmt: skip
def test_large_numbers(value: float | None, text: str) -> None:
    assert large(value) == text


def test_small_numbers_names_and_bars() -> None:
    assert [ratio(x) for x in (0.0213, 0.0, 3e-6, None)] == ["0.021", "0", "3e-06", "–"]
    assert short("model.layers.0.self_attn.q_proj.weight", 20) == "model.lay…ttn.q_proj"
    assert short("0.mlp.up.weight") == "0.mlp.up"
    assert len(short("a" * 60)) == 25
    assert common_prefix(["a.b.0.x", "a.b.1.x"]) == "a.b."
    assert common_prefix(["a.b0.x", "a.b1.x"]) == "a."
    assert common_prefix(["a.b"]) == ""
    assert spark([1.0, 2.0, 3.0]) == "▁▅█"
    assert spark([5.0]) == "▁"
    assert len(spark([float(i) for i in range(1000)])) <= 32
    assert spark([1.0, 10.0, 100.0], logarithmic=True) == spark([1.0, 2.0, 3.0])
