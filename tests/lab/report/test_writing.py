"""A report shows the results of the runs next to those of the paper."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.results.pairing import FIELDS
from tests.lab.helpers.made_campaigns import (
    MACHINE,
    VERSIONS,
    experiment,
    race,
    short,
    write_campaign,
    write_lines,
    write_run,
)
from tests.lab.helpers.reports import Tags, edit_json, reported


def rows_of(markdown: str, first: str) -> list[list[str]]:
    """The cells of every table row whose first cell is `first`."""
    lines = [line for line in markdown.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def ptb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_campaign(tmp_path_factory.mktemp("ptb") / "campaign", experiment("ptb"))


@pytest.fixture(scope="module")
def ptb_report(ptb: Path) -> tuple[str, str]:
    return reported(ptb)


def window_mean(folder: Path, arm: str, seed: int, first: int, last: int) -> float:
    """Straight from the file, as a reader would check it."""
    lines = (folder / "runs" / f"{arm}-s{seed}" / "metrics.jsonl").read_text().splitlines()
    return statistics.fmean(json.loads(line)["loss"] for line in lines[first - 1 : last])


WINDOWS = ((201, 300), (501, 600), (901, 1000))


def test_both_figures_stand_side_by_side(ptb: Path, ptb_report: tuple[str, str]) -> None:
    markdown, page = ptb_report
    paper = rows_of(markdown, "paper")
    assert [row[1:] for row in paper] == [
        ["1.46773", "1.28084", "1.17560", "1.30257"],
        ["1.45689", "1.28167", "1.17000", "1.29757"],
    ]
    for row, arm in zip(rows_of(markdown, "here"), ("muon", "go-muon"), strict=True):
        by_seed = [[window_mean(ptb, arm, seed, *w) for w in WINDOWS] for seed in range(3)]
        means = [statistics.fmean(column) for column in zip(*by_seed, strict=True)]
        trajectory = statistics.fmean(statistics.geometric_mean(windows) for windows in by_seed)
        assert row[1:] == [f"{value:.5f}" for value in (*means, trajectory)]
        for figure in row[1:]:
            assert figure in page
    for figure in paper[0][1:]:
        assert figure in page


def test_paired_differences_have_students_interval(ptb: Path, ptb_report: tuple[str, str]) -> None:
    (row,) = rows_of(ptb_report[0], "201–300")
    pairs = [
        [window_mean(ptb, arm, seed, 201, 300) for arm in ("muon", "go-muon")] for seed in range(3)
    ]
    differences = [candidate - control for control, candidate in pairs]
    mean = statistics.fmean(differences)
    half = 4.302652729911275 * statistics.stdev(differences) / math.sqrt(3)  # t of 2 degrees
    relative = 100 * mean / statistics.fmean(control for control, _ in pairs)

    def signed(value: float, digits: int = 5) -> str:
        return f"{value:+.{digits}f}".replace("-", "−")

    wins = sum(difference < 0 for difference in differences)
    assert row[1:5] == [
        signed(mean),
        f"{signed(mean - half)} to {signed(mean + half)}",
        f"{signed(relative, 2)} %",
        f"{wins}/3",
    ]
    assert row[5] == "−0.74 %"  # the paper's gain
    assert row[7:] == [signed(difference) for difference in differences]


def test_the_answer_comes_first_then_the_picture(ptb_report: tuple[str, str]) -> None:
    markdown, page = ptb_report
    headline = markdown.split("\n\n")[1]
    assert headline.startswith("**Go-MUON (K=4) has 0.")
    assert "lower training loss than Muon" in headline
    places = [page.index(mark) for mark in ("<h1>", "<ol", "<img", "<table")]
    assert places == sorted(places)
    assert "QUICK" not in markdown
    assert "QUICK" not in page


def test_the_page_needs_nothing_but_itself(ptb: Path, ptb_report: tuple[str, str]) -> None:
    page = ptb_report[1]
    tags = Tags(page)
    assert not [tag for tag, _ in tags.found if tag in ("script", "iframe", "object", "embed")]
    addresses = [
        value
        for _, attributes in tags.found
        for name, value in attributes.items()
        if name in ("src", "srcset", "href")
    ]
    assert addresses
    assert all((value or "").startswith("data:") for value in addresses)
    assert "url(" not in page
    assert "@import" not in page
    pictures = [attributes for tag, attributes in tags.found if tag == "img"]
    assert len(pictures) == 2
    assert all(len(attributes["alt"] or "") > 40 for attributes in pictures)
    for text in ptb_report:  # a report may be passed on: it tells nothing about the disk
        assert str(ptb.parent) not in text


def test_the_same_runs_give_the_same_bytes(ptb: Path, ptb_report: tuple[str, str]) -> None:
    assert reported(ptb) == ptb_report


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str]]:
    """The report of a shortened experiment, written once."""

    @functools.cache
    def report_of(name: str) -> tuple[str, str]:
        plan = short(name, seeds=EXPERIMENTS[name].seeds[:2])
        folder = write_campaign(tmp_path_factory.mktemp(name) / "campaign", plan)
        if plan.timing:
            timing = {"arms": plan.timing, "seconds": [[0.1, 0.2], [0.07, 0.16]]}
            (folder / "timing.json").write_text(json.dumps(timing))
        return reported(folder)

    return report_of


Quick = Callable[[str], tuple[str, str]]


@pytest.mark.parametrize("name", ["shakespeare", "mapback", "lazy", "grokking"])
def test_every_experiment_has_its_report(name: str, quick: Quick) -> None:
    plan = EXPERIMENTS[name]
    markdown, page = quick(name)
    told = " ".join(Tags(page).text)
    assert plan.paper is not None
    for text in (markdown, told):
        assert "QUICK" in text
        assert "The paper's table" in text
        assert plan.paper.source[:20] in text
        for fact in (plan.statistic[:40], plan.rule[:30], plan.arms[0].title):
            assert fact in text


def test_mapback_is_decided_by_its_one_window(quick: Quick) -> None:
    assert "loss, 13–18" in quick("mapback")[0]  # 201-300 of 1,000 updates, shrunk to 60


def test_shakespeare_shows_its_tuning_and_both_controls(quick: Quick) -> None:
    markdown, _ = quick("shakespeare")
    assert len(rows_of(markdown, "muon-lr0.02")) == 1
    assert rows_of(markdown, "go-muon-lr0.08")[0][3] == "1.45132"
    assert "minus Muon + Q/K (our interpretation)" in markdown
    assert "minus Muon (tuned)" in markdown


def test_lazy_shows_times_and_alignments(quick: Quick) -> None:
    markdown, _ = quick("lazy")
    assert "Lazy (K=4) takes 0.748× the time of Refresh 1 (K=1)" in markdown
    assert "The paper's step-time ratio: 0.798×" in markdown
    ratios = [row[2] for row in rows_of(markdown, "Lazy (K=4)") if row[1].endswith("ms")]
    assert 0.7 < float(ratios[0].removesuffix("×")) < 0.9  # the made steps differ by 1.25
    alignments = [row[1:] for row in rows_of(markdown, "Refresh 1 (K=1)") if len(row) == 4]
    assert alignments[-1] == ["0", "0", "120"]


def test_grokking_has_the_papers_steps_beside_its_own(tmp_path: Path) -> None:
    plan = experiment("grokking", steps=4000)
    markdown, _ = reported(write_campaign(tmp_path / "c", plan))
    first, second = rows_of(markdown, "Go-MUON 0.08")
    assert first[2::2][:3] == ["64", "290", "226"]
    assert second[2::2][:3] == ["68", "220", "152"]
    ours, control = int(first[3]), int(rows_of(markdown, "Muon 0.16")[0][3].replace(",", ""))
    assert first[8:] == [f"{control / ours:.1f}×", "8.0×"]
    assert int(first[5]) == ours - int(first[1])
    assert "selects here rate 0.16 for muon and 0.08 for go-muon" in markdown
    assert f"{control / ours:.1f} times at p=103" in markdown.split("\n\n")[1]


def test_a_race_is_ranked_whatever_the_order_of_its_arms(tmp_path: Path) -> None:
    plan = race(("adamw", "muon", "go-muon"), steps=3000, seeds=(0, 1, 2))
    markdown, page = reported(write_campaign(tmp_path / "c", plan))
    assert [rows_of(markdown, f"{place}.")[0][1] for place in (1, 2, 3)] == [
        "go-muon 0.08",
        "muon 0.16",
        "adamw 0.01",
    ]
    assert "go-muon 0.08 groks" in markdown.split("\n\n")[1]
    assert "muon 0.16" in markdown.split("\n\n")[1]
    assert rows_of(markdown, "adamw 0.01")[0][2] == "never"
    assert page.count('class="card') == 3
    assert page.count("winner") >= 1


def test_a_race_of_character_models_is_ranked(tmp_path: Path) -> None:
    plan = race(
        ("adamw", "go-muon", "muon"), task="ptb", steps=80, windows=((17, 24), (41, 48), (73, 80))
    )
    markdown, _ = reported(write_campaign(tmp_path / "c", plan))
    assert rows_of(markdown, "1.")[0][1] == "go-muon 0.08"
    assert rows_of(markdown, "3.")[0][1] == "adamw 0.01"
    assert "go-muon 0.08 has" in markdown.split("\n\n")[1]
    assert "paper" not in markdown


def test_a_tie_is_called_a_tie(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", short("ptb"))
    for seed, sign in ((0, 1), (1, -1), (2, 1)):
        source = folder / "runs" / f"muon-s{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        shifted = [{**line, "loss": line["loss"] + 0.01 * sign} for line in lines]
        write_lines(folder / "runs" / f"go-muon-s{seed}" / "metrics.jsonl", shifted)
    assert "3 seeds cannot tell from a tie" in reported(folder)[0].split("\n\n")[2]


def test_an_unfinished_campaign_is_reported_as_such(tmp_path: Path) -> None:
    plan = short("ptb")
    folder = write_campaign(tmp_path / "c", plan)
    for name in ("muon-s1", "go-muon-s2"):
        shutil.rmtree(folder / "runs" / name)
    write_run(folder / "runs" / "muon-s1", plan.config(plan.arms[0], 1, 0.02), made=23)
    with (folder / "runs" / "muon-s1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 24, "lo')  # a kill in the middle of a line
    markdown, page = reported(folder)
    assert rows_of(markdown, "muon-s1")[0][1] == "23 of 60 updates"
    assert rows_of(markdown, "go-muon-s2")[0][1] == "not started"
    assert "4 of 6 runs finished" in markdown
    assert "2 runs to go" in page
    assert "here over seed 0." in markdown  # the one seed that both arms have finished
    assert rows_of(markdown, "201–300") == []


@pytest.mark.parametrize("task", ["grokking", "ptb"])
def test_arms_are_ranked_on_common_seeds_only(task: str, tmp_path: Path) -> None:
    windows = ((5, 8), (11, 14), (17, 20)) if task == "ptb" else ()
    plan = race(("go-muon", "muon"), steps=20, task=task, windows=windows, seeds=(0, 1))
    folder = write_campaign(tmp_path / "c", plan)
    (folder / "runs" / "go-muon-s0" / "result.json").unlink()
    (folder / "runs" / "muon-s1" / "result.json").unlink()
    markdown, _ = reported(folder)
    assert "No seed is finished in every arm yet" in markdown
    assert rows_of(markdown, "1.") == []


def test_a_campaign_without_any_run_is_reported(tmp_path: Path) -> None:
    for name, plan in (("ptb", short("ptb")), ("race", race())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan.declaration()))
        markdown, page = reported(folder)
        assert "No run has finished yet" in markdown
        assert "not started" in page


def test_a_run_that_diverged_loses_and_says_so(tmp_path: Path) -> None:
    for name, plan in (("c", short("ptb")), ("g", race(steps=300))):
        folder = write_campaign(tmp_path / name, plan)
        for seed in plan.seeds:
            run = folder / "runs" / f"{'go-muon'}-s{seed}"
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:10]
            (run / "metrics.jsonl").write_text("".join(lines))
            edit_json(run / "result.json", steps=10, diverged_at=11)
        assert "diverged" in reported(folder)[0]


def test_a_single_run_has_a_report(tmp_path: Path) -> None:
    plan = race(steps=400)
    folder = write_run(tmp_path / "run", plan.config(plan.arms[0], 0, 0.08))
    markdown, _ = reported(folder)
    assert "go-muon groks after" in markdown
    other = short("ptb")
    markdown, _ = reported(write_run(tmp_path / "two", other.config(other.arms[0], 0, 0.02)))
    assert "muon: loss 1." in markdown


def test_runs_that_are_not_declared_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    plan = race(steps=20)
    write_run(folder / "runs" / "muon-s9", plan.config(plan.arms[1], 9, 0.16))
    markdown, _ = reported(folder)
    assert "left out: muon-s9" in markdown


def test_a_full_run_says_which_hashes_agree(ptb: Path, ptb_report: tuple[str, str]) -> None:
    hashes = json.loads((ptb / "runs" / "muon-s1" / "manifest.json").read_text())["hashes"]
    (row,) = rows_of(ptb_report[0], "seed 1")
    assert row[1:] == ["2", *(hashes[field][:12] for field in FIELDS)]


def test_a_run_continued_by_other_code_is_named_with_its_commits(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(("go-muon", "muon"), steps=20))
    assert "continued" not in reported(folder)[0]
    path = folder / "runs" / "muon-s0" / "manifest.json"
    other = {"versions": VERSIONS | {"torch": "2.9"}, "machine": MACHINE}
    edit_json(path, commit="a" * 40, resumed=[{"step": 12, "commit": "b" * 40, **other}])
    markdown, page = reported(folder)
    assert rows_of(markdown, "muon-s0")[-1][1:] == ["12", "b" * 12]
    for text in (markdown, page):
        assert f"unknown, {'a' * 40}, {'b' * 40}" in text
        assert "2.0, 2.9" in text


def groks_at(run: Path, when: int | None, steps: int = 300) -> None:
    """Give a made run held-out accuracies that reach all pairs at that update."""
    lines = [
        {"step": i, "loss": 0.1, "train_accuracy": 1.0}
        | ({} if i % 10 else {"test_accuracy": float(when is not None and i >= when)})
        for i in range(1, steps + 1)
    ]
    write_lines(run / "metrics.jsonl", lines)


def test_grokking_ranks_by_the_mean_a_bound_where_a_seed_never_groks(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(("go-muon", "muon"), seeds=(0, 1, 2), steps=300))
    for seed, when in enumerate((100, 100, None)):
        groks_at(folder / "runs" / f"go-muon-s{seed}", when)
        groks_at(folder / "runs" / f"muon-s{seed}", 160)
    markdown, _ = reported(folder)
    headline = markdown.split("\n\n")[1]
    assert "muon 0.16 groks after 160 updates, go-muon 0.08 after over 167" in headline
    standing = [line for line in markdown.splitlines() if re.match(r"\| \d\.", line)]
    assert "muon 0.16 | 160 updates" in standing[0]
    assert "go-muon 0.08 | over 167 updates" in standing[1]
    assert "groks on 2 of 3 seeds" in standing[1]
    (row,) = [row for row in rows_of(markdown, "go-muon 0.08") if "1" in row]
    assert row[2] == "over 167"


def test_a_run_that_groks_and_diverges_is_last(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(("go-muon", "muon"), seeds=(0, 1), steps=300))
    for seed in (0, 1):
        groks_at(folder / "runs" / f"go-muon-s{seed}", 100, steps=200 if seed else 300)
        groks_at(folder / "runs" / f"muon-s{seed}", 250)
    edit_json(folder / "runs" / "go-muon-s1" / "result.json", steps=200, diverged_at=201)
    markdown, _ = reported(folder)
    standing = [line for line in markdown.splitlines() if re.match(r"\| \d\.", line)]
    assert "muon 0.16" in standing[0]
    assert "diverged at update 201" in standing[1]
