"""`gomuon bench` from start to page, and docs/speed.md from its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab import cli, machine
from gomuon.lab.bench import (
    benchmark,
    growth,
    measurement,
    speed_page,
    tokens_per_step,
    workloads,
)
from gomuon.lab.bench.command import judged_beside
from gomuon.lab.bench.workloads import Size
from tests.lab.helpers.commands import refused
from tests.lab.helpers.made_bench import made_result

ROOT = Path(__file__).parents[3]
ARMS = "adamw,muon,go-muon-4,newton-schulz,plain-go-muon-4"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A quick benchmark of a second: `--quick` means the smallest models of all."""
    small: Size = "tiny"
    for shapes in workloads.SHAPES.values():
        monkeypatch.setitem(shapes, "quick", shapes[small])
    monkeypatch.setitem(growth.SIZES, "quick", growth.SIZES[small])
    monkeypatch.setitem(tokens_per_step.SIZES, "quick", tokens_per_step.SIZES[small])
    monkeypatch.setitem(growth.BASE, "quick", growth.BASE[small])
    monkeypatch.setitem(growth.HEAD, "quick", growth.HEAD[small])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    return tmp_path


def bench(*arguments: str) -> None:
    assert cli.main(["bench", "--quick", "--threads", "1", *arguments]) == 0


def test_from_start_to_page(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("--models", "paper,conv", "--arms", ARMS, "--out", "out")
    said = capsys.readouterr().out
    assert "Go-MUON, K = 4" in said
    assert "memory of a reuse step" in said
    result = json.loads((tiny / "out" / "bench.json").read_text())
    assert result["threads"] == 1
    assert result["command"] == (
        f"gomuon bench --out out --models paper,conv --arms {ARMS} --threads 1 --quick"
    )
    assert {"torch", "heavyball", "pytorch_optimizer"} <= result["versions"].keys()
    paper = result["workloads"]["paper"]["arms"]
    assert set(paper) == set(ARMS.split(","))
    assert all(entry["step"]["value"] > 0 for entry in paper.values())
    assert result["workloads"]["conv"]["arms"]["plain-go-muon-4"]["failed"]
    assert result["memory"]["hooks"]["ratio"] == pytest.approx(1, abs=0.01)
    for axis in ("width", "depth"):
        assert result["scaling"][axis]["arms"]["go-muon-4"]["exponent"] is not None
    tokens = result["tokens"]["paper"]
    assert tokens["sizes"] == [16, 64]
    assert set(tokens["arms"]) == {"adamw", "go-muon-4", "newton-schulz"}
    assert all(min(entry["whole"]) > 0 for entry in tokens["arms"].values())
    operations = result["operations"]["paper"]["arms"]
    assert set(operations) == set(ARMS.split(","))
    assert all(entry["python"] > 0 for entry in operations.values())
    report = (tiny / "out" / "report.md").read_text()
    assert report == speed_page.markdown(
        benchmark.read_results(tiny / "out"), "bench.json", "bench"
    )
    assert "Quick run" in report
    assert str(tiny) not in report + json.dumps(result), "nobody else's folders"
    for name in ("bench.svg", "bench-dark.svg"):
        assert (tiny / "out" / name).read_text().rstrip().endswith("</svg>")

    assert cli.main(["bench", "--page", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "from `out/bench.json`" in printed
    assert 'src="../out/bench.svg"' in printed


def test_a_stopped_benchmark_continues(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ["--models", "mlp", "--arms", "muon", "--no-scaling"]
    bench(*first, "--out", "out")
    before = json.loads((tiny / "out" / "bench.json").read_text())["workloads"]["mlp"]
    capsys.readouterr()
    both = ["--models", "mlp,paper", "--arms", "muon", "--no-scaling", "--out", "out"]
    bench(*both)
    assert "layers 12×12: measured before" in capsys.readouterr().out
    after = json.loads((tiny / "out" / "bench.json").read_text())["workloads"]
    assert after["mlp"] == before
    assert "paper" in after

    bench(*first, "--cycles", "1", "--out", "out")
    assert "measured before" not in capsys.readouterr().out, "other settings, another measurement"

    # The code that is measured is the same, whatever the commit.
    monkeypatch.setattr(machine, "source_commit", lambda: "other")
    bench(*both)
    assert "measured before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"source": "other"}, "source other there, "),
        ({"threads": 7}, "threads 7 there, 1 here"),
        ({"versions": {"torch": "0.4"}}, "torch 0.4 there, "),
        ({"machine": {"processor": "made"}}, "processor made there, "),
        ({"size": "full"}, "size full there, quick here"),
        ({"format": 0}, "format 0 there, 1 here"),
        ({"machine": None}, "machine None there, "),
        ({"vectors": "made of bfloat16"}, "vectors made of bfloat16 there, "),
    ],
)
def test_what_was_measured_otherwise_is_refused_and_kept(
    environment: dict[str, Any], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_result(mlp={"muon": 1.0}) | benchmark.environment("quick") | {"threads": 1}
    for key, value in environment.items():
        made[key] = made[key] | value if isinstance(value, dict) else value
    (tiny / "out").mkdir()
    path = tiny / "out" / "bench.json"
    path.write_text(json.dumps(made))
    asked = ["--models", "paper", "--arms", "muon", "--no-scaling", "--out", "out"]
    said = refused(["bench", "--quick", "--threads", "1", *asked], capsys)
    assert f"out/bench.json was measured under other conditions ({words}" in said
    assert "use --fresh to delete it and measure everything again, or choose another folder" in said
    assert json.loads(path.read_text()) == made


def test_the_lab_code_that_the_benchmark_runs_is_part_of_its_source() -> None:
    lab = Path(benchmark.__file__).parents[1]
    imports = re.compile(r"^from gomuon\.lab\.([\w.]+) import (.*)", re.MULTILINE)
    imported = set()
    for path in (lab / "bench").glob("*.py"):
        text = path.read_text()
        for source, names in imports.findall(text):
            is_folder = (lab / source.replace(".", "/")).is_dir()
            imported |= {f"{source}.{n}" for n in names.split(", ")} if is_folder else {source}
    counted = {name.removesuffix(".py").replace("/", ".") for name in benchmark.OF_THE_LAB}
    # These print, draw, give names or check input: they change no number.
    others = {"errors", "flags", "input_checks", "terminal", "report.document", "report.markdown"}
    others |= {"report.svg", "formatting", "files", "experiments.optimizers"}
    folders = ("bench", "costs")
    assert {name for name in imported - others if not name.startswith(folders)} == counted


def test_ctrl_c_keeps_the_finished_parts(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--models", "mlp,paper", "--arms", "muon", "--no-scaling", "--out", "out"]
    bench(*asked)
    real = measurement.measure

    def measure(workload: workloads.Workload, *rest: Any) -> Any:
        if workload.name == "paper":
            raise KeyboardInterrupt
        return real(workload, *rest)

    monkeypatch.setattr(measurement, "measure", measure)
    command = ["bench", "--quick", "--threads", "1", *asked]
    assert cli.main([*command, "--fresh"]) == 130
    said = capsys.readouterr().err
    assert "stopped; finished parts are kept, the current part starts again" in said
    assert "nothing is lost" not in said
    assert said.strip().endswith(f"continue with: gomuon {' '.join(command)}")
    result = json.loads((tiny / "out" / "bench.json").read_text())
    assert list(result["workloads"]) == ["mlp"]


def test_a_file_that_has_a_release_behind_the_system_is_continued(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--models", "mlp", "--arms", "muon", "--no-scaling", "--out", "out"]
    bench(*asked)
    path = tiny / "out" / "bench.json"
    older = json.loads(path.read_text())
    older["machine"]["system"] += " 6.1.0-made"
    path.write_text(json.dumps(older))
    bench(*asked)
    assert "measured before" in capsys.readouterr().out


def test_fresh_measures_again(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--models", "mlp", "--arms", "muon", "--no-scaling", "--out", "out"]
    bench(*asked)
    bench(*asked, "--fresh")
    assert "measured before" not in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "source_digest", lambda: "other")
    bench(*asked, "--fresh")
    assert json.loads((tiny / "out" / "bench.json").read_text())["source"] == "other"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--models papr", "unknown model 'papr'; did you mean 'paper'?"),
        ("--arms torch-mon", "unknown arm 'torch-mon'; did you mean 'torch-muon'?"),
        ("--cycles 0", "--cycles must be at least 1, not 0"),
        ("--threads 0", "--threads must be at least 1, not 0"),
        (
            "--page --out nowhere",
            "does not exist; create it with gomuon bench --out nowhere",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, words: str, refused_without_a_trace: Callable[[str], str]
) -> None:
    assert words in refused_without_a_trace(f"bench {arguments}")


def test_a_file_of_another_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.json").write_text('{"format": 0}')
    assert "has format 0; expected 1" in refused(
        ["bench", "--page", "--out", str(tmp_path)], capsys
    )


def test_a_page_says_the_same_from_memory_and_from_its_file(tmp_path: Path) -> None:
    result = made_result(
        wide={"muon": 1.0}, paper={"torch_muon": 5.0, "muon_fast": 0.4}, mlp={"muon": 0.1}
    )
    (tmp_path / "bench.json").write_text(json.dumps(result, sort_keys=True))
    text = speed_page.markdown(benchmark.read_results(tmp_path), "f", "p")
    assert "2 cores, AVX2" in text
    assert text == speed_page.markdown(benchmark.in_benchmark_order(result), "f", "p")
    assert re.findall("^## The (\\w+) model", text, re.MULTILINE) == ["paper", "wide", "mlp"]
    line = "3 | paper: whole step, Muon, fast polar / torch Muon, with bfloat16 units | 1.00 |"
    assert f"| {line} 0.233 ± 0.033 | no bfloat16 units |" in text


def test_targets_are_judged_by_a_run_of_their_own(tmp_path: Path) -> None:
    folder, alone = tmp_path / "bench", tmp_path / "targets"
    for place, ours in ((folder, 0.4), (alone, 0.3)):
        place.mkdir()
        result = made_result(paper={"torch_muon": 5.0, "muon_fast": ours})
        (place / "bench.json").write_text(json.dumps(result))
    judged = judged_beside(folder)
    assert judged is not None
    assert judged_beside(tmp_path / "elsewhere" / "bench") is None
    both = speed_page.markdown(benchmark.read_results(folder), "f", "p", judged)
    only = speed_page.markdown(benchmark.read_results(alone), "f", "p")

    def line(text: str) -> str:
        return next(one for one in text.splitlines() if "fast polar / torch Muon" in one)

    assert line(both) == line(only)
    assert "| Muon, fast polar | 1 | 0.400" in both, "the tables are the benchmark's"


def test_the_committed_page_is_made_from_the_committed_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", "--page"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for name in ("bench.svg", "bench-dark.svg"):
        assert (ROOT / "results" / "bench" / name).exists()
