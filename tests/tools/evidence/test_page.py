"""The page says what the files say: figures and pictures, and nothing of the absent."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from gomuon.lab.experiments.catalogue import EXPERIMENTS, OPEN_QUESTIONS
from gomuon.lab.experiments.cost_plans import (
    BLOCK_ARMS,
    BLOCK_TASKS,
    FAST_TASKS,
    PRESET_ARMS,
    SPEED_RATES,
)
from gomuon.lab.experiments.rate_plans import DEFAULTS, NANOGPT_RATES
from gomuon.lab.experiments.routing_plans import ROUTING
from gomuon.lab.experiments.state_plans import STATE_ARMS, STATE_SEEDS
from tests.tools.evidence.made_results import everything, small_plan, thin_campaign
from tools.evidence import claims, paper_lookup, picture_data, picture_drawing
from tools.evidence.campaign_list import CAMPAIGNS
from tools.evidence.command import main
from tools.evidence.estimates import estimate, excludes_zero, relative_pairs
from tools.evidence.page import markdown
from tools.evidence.results_folder import read_evidence
from tools.evidence.sections import open_questions, rates, routing, time_to_quality
from tools.evidence.sections.open_questions import is_free, over_all_tasks
from tools.evidence.thinned_curve import Curve

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything(tmp_path_factory.mktemp("whole") / "results")


@pytest.fixture(scope="module")
def page(whole: Path) -> str:
    evidence = read_evidence(whole)
    return markdown(evidence, [f"{name}.svg" for name in picture_data.NAMES])


def rows_of(text: str, first: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def part(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.S | re.M)
    return str(found)


def result(folder: Path, run: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs" / run / "result.json").read_text())
    return content


# ---- the absent ----------------------------------------------------------------------------------


def test_of_what_is_absent_nothing_is_claimed(tmp_path: Path) -> None:
    text = markdown({}, [])
    assert "Nothing has been run yet." in text
    for claim in (*claims.ABSTRACT, *claims.FURTHER):
        verdict, _ = claim.finding({})
        assert verdict == ("not run yet" if claim.campaign else "reproduced")
    for name in CAMPAIGNS:
        assert f"| `{name}` | not run yet |" in text
    for figure in ("1.46773", "1.51072", "2,320", "0.798×", "1.48882", "1.16917"):
        assert figure in text, "the paper's figures stand there all the same"
    assert "<img" not in text


def test_an_unfinished_campaign_has_no_verdict(tmp_path: Path) -> None:
    thin_campaign(tmp_path / "ptb", small_plan(seeds=(0, 1, 2)))
    for path in (tmp_path / "ptb" / "runs" / "muon-s2").iterdir():
        path.unlink()
    (tmp_path / "ptb" / "runs" / "muon-s2").rmdir()
    evidence = read_evidence(tmp_path)
    assert claims.ABSTRACT[3].finding(evidence) == ("not run yet", "`ptb`: 5 of 6 runs so far")
    text = markdown(evidence, [])
    assert "5 runs of 6; nothing is concluded that needs the missing ones" in text
    assert "Not whole: `ptb` (5 of 6 runs so far)" in text
    assert picture_drawing.draw_all(evidence) == {}


# ---- figures beside the paper's ------------------------------------------------------------------


def test_means_stand_beside_the_papers_with_their_interval(whole: Path, page: str) -> None:
    section = part(page, "Penn Treebank: Go-MUON against Muon")
    values = [result(whole / "ptb", f"muon-s{seed}")["geometric_mean"] for seed in range(3)]
    mean = statistics.fmean(values)
    half = 4.302652729911275 * statistics.stdev(values) / math.sqrt(3)  # t of 2 degrees
    share = f"{100 * (mean / 1.30257 - 1):+.2f} %".replace("-", "−")
    assert (
        f"| geometric mean | 1.30257 | {mean:.5f} | {mean - half:.5f} to {mean + half:.5f} "
        f"| {share} |"
    ) in section


def test_the_papers_shares_are_those_it_prints() -> None:
    for name, control, candidate in (
        ("ptb", "muon", "go-muon"),
        ("shakespeare", "muon-qk", "go-muon"),
        ("mapback", "halfspace", "go-muon"),
    ):
        figures = paper_lookup.figures_of(name)
        checked = 0
        for measure, gain in figures.gains.items():
            share = paper_lookup.published_gain(name, control, candidate, measure)
            if share is not None:
                assert round(-100 * share, 2) == gain
                checked += 1
        assert checked == len([m for m in figures.gains if "tuning" not in m])
    for (name, measure), difference in paper_lookup.DIFFERENCES.items():
        (control, candidate) = EXPERIMENTS[name].comparisons[0]
        a, b = (paper_lookup.published_loss(name, arm, measure) for arm in (control, candidate))
        assert a is not None
        assert b is not None
        assert b - a == pytest.approx(difference, abs=1.1e-5), "up to the paper's own rounding"


def test_tuning_runs_stand_beside_the_papers(whole: Path, page: str) -> None:
    section = part(page, "Tiny Shakespeare: Go-MUON against the Q/K control and a tuned Muon")
    here = result(whole / "shakespeare", "go-muon-lr0.08-s17401")["geometric_mean"]
    rows = rows_of(section, "go-muon, lr 0.08")
    assert [row[1] for row in rows] == ["201–300", "501–600", "901–1000", "geometric mean"]
    assert rows[-1][2:4] == ["1.45132", f"{here:.5f}"]


def test_grok_steps_stand_beside_the_papers(whole: Path, page: str) -> None:
    section = part(page, "Modular addition: when do they grok?")
    here = result(whole / "grokking", "p103-go-muon-0.08-s0")
    (row,) = [row for row in rows_of(section, "p=103") if row[1] == "Go-MUON 0.08"]
    wanted = [here[name] for name in ("train_99_step", "grok_step", "delay")]
    assert row[2:8:2] == ["64", "290", "226"]
    assert row[3:8:2] == [f"{value:,}" for value in wanted]
    assert row[8] == f"{100 * here['final_test_accuracy']:.2f} %"
    muon = result(whole / "grokking", "p103-muon-0.16-s0")["grok_step"]
    assert f"| p=103 | 8.0× | {muon / here['grok_step']:.1f}× |" in section


# ---- the comparison, time to quality and the open questions --------------------------------------


def test_the_race_ranks_by_the_mean_and_says_what_was_picked(whole: Path, page: str) -> None:
    section = part(page, "Penn Treebank")
    rows = [row for rank in "1234" for row in rows_of(section, rank)]
    means = {}
    for arm in ("go-muon", "muon", "adamw", "go-muon-input"):
        runs = [result(whole / "race-ptb", f"{arm}-s{seed}") for seed in (101, 102, 103)]
        means[arm] = statistics.fmean(run["geometric_mean"] for run in runs)
    ranked = sorted(means, key=means.__getitem__)
    titles = {"go-muon": "Go-MUON", "muon": "Muon", "adamw": "AdamW"}
    assert [row[1] for row in rows] == [titles.get(a, "Go-MUON input only") for a in ranked]
    assert [row[6] for row in rows] == [f"{means[arm]:.5f}" for arm in ranked]
    selection = json.loads((whole / "tune-ptb" / "selection.json").read_text())["methods"]
    edges = {"lower": "lowest", "upper": "highest", None: "no"}
    for row, arm in zip(rows, ranked, strict=True):
        assert row[2] == f"{selection[arm]['rate']:g}"
        assert row[4] == edges[selection[arm]["edge"]]
        assert row[5] == f"{selection[arm]['statistic']:.5f}"
    assert "Budget: 3 rates per method" in section
    assert "Every candidate: seed 100, 200 updates." in section
    assert "seeds 101, 102 and 103, 1,000 updates each" in section
    assert f"{titles.get(ranked[0], 'Go-MUON input only')} is first:" in section


def test_a_race_of_grok_steps_counts_those_that_never_do(whole: Path, page: str) -> None:
    section = part(page, "Modular addition")
    (adamw,) = [row for rank in "1234" for row in rows_of(section, rank) if row[1] == "AdamW"]
    assert adamw[5:9] == ["over 300", "over 600", "–", "0 of 3"]
    assert adamw[9] == "–", "what never grokked cannot lose it again"
    assert adamw[-3:] == ["never"] * 3
    (go,) = [row for rank in "1234" for row in rows_of(section, rank) if row[1] == "Go-MUON"]
    runs = [result(whole / "race-grokking", f"go-muon-s{seed}") for seed in (101, 102, 103)]
    below = sum(len(run["retention_failures"]) for run in runs)
    later = sum((600 - run["grok_step"]) // 10 for run in runs)
    ending = statistics.fmean(run["final_test_accuracy"] for run in runs)
    assert go[8:11] == ["3 of 3", f"{below} of {later}", f"{100 * ending:.1f} %"]
    muon = [result(whole / "race-grokking", f"muon-s{seed}") for seed in (101, 102, 103)]
    certain = all(run["grok_step"] is not None for run in muon)
    assert ("against Muon" in section) == certain, "no column for what cannot be compared"
    assert "Go-MUON groks in 3 of 3 runs; " in section


def test_a_method_arrives_when_its_mean_over_50_updates_does() -> None:
    falling = Curve(updates=100, loss=tuple(10.0 - i for i in range(10)))
    assert time_to_quality.final_loss(falling) == 3.0
    assert time_to_quality.first_update_at(falling, 8.0) == 50, "blocks 10 to 6 have the mean 8"
    assert time_to_quality.first_update_at(falling, 7.5) == 60
    assert time_to_quality.first_update_at(falling, 2.9) is None
    assert time_to_quality.UpdatesToTarget((50, 60)).mean == 55
    assert time_to_quality.UpdatesToTarget((50, None)).mean is None


def test_time_is_updates_times_the_whole_step(whole: Path, page: str) -> None:
    section = part(page, "Time to quality: Penn Treebank")
    timing = json.loads((whole / "race-ptb" / "timing.json").read_text())
    place = {name: index for index, name in enumerate(timing["arms"])}
    (row,) = rows_of(section, "Muon")
    pace = (place["muon"] + 1) / (place["adamw"] + 1)
    assert row[1] == f"{pace:.2f}"
    updates = float(row[2].replace(",", ""))
    units, seconds = re.fullmatch(r"([\d,]+) \(([\d,]+) s\)", row[3]).groups()  # type: ignore[union-attr]
    assert float(units.replace(",", "")) == pytest.approx(updates * pace, abs=1)
    unit = statistics.fmean(timing["seconds"][place["adamw"]])
    assert float(seconds.replace(",", "")) == pytest.approx(updates * pace * unit, abs=1)
    (own,) = rows_of(section, "AdamW")
    assert float(own[2].replace(",", "")) <= 1000, "AdamW reaches its own final loss"


def test_open_questions_are_answered_by_rule(whole: Path, page: str) -> None:
    section = part(page, "How often must the geometry be renewed?")
    seeds = range(3)
    values = {
        arm: [result(whole / "ablations", f"{arm}-s{s}")["geometric_mean"] for s in seeds]
        for arm in ("k4", "k1")
    }
    share = statistics.fmean(values["k1"]) / statistics.fmean(values["k4"]) - 1
    wins = sum(b < a for a, b in zip(values["k4"], values["k1"], strict=True))
    (row,) = [row for row in rows_of(section, "`ablations`") if row[1].startswith("K = 1,")]
    assert row[3] == f"{100 * share:+.2f} %".replace("-", "−")
    assert row[5] == f"{wins} of 3"
    found = relative_pairs(values["k4"], values["k1"])
    assert ("K = 1 is " in section) == excludes_zero(found)
    decay = part(page, "Weight decay in the geometry or plain?")
    assert "Σ lr·wd over the run is 1.000 (plain-decay) and 1.000 (geometry-decay): equal" in decay
    rates = part(page, "How much does AdamW's rate matter in modular addition?")
    steps = [result(whole / "adamw-rate", f"go-muon-1e-3-s{seed}")["grok_step"] for seed in seeds]
    (row,) = rows_of(rates, "0.001")
    assert row[3] == ", ".join(f"{step:,}" for step in steps)
    ends = {
        rate: [
            result(whole / "adamw-rate", f"go-muon-{rate}-s{seed}")["final_test_accuracy"]
            for seed in seeds
        ]
        for rate in ("1e-3", "3e-3", "1e-2")
    }
    assert row[4] == ", ".join(f"{100 * end:.1f} %" for end in ends["1e-3"])
    assert "Muon groks within 600 updates in 0 of 9 runs." in rates
    kept = [sum(end >= 0.99 for end in of_rate) for of_rate in ends.values()]
    words = (
        f"those, {kept[0]} of 3 at 0.001, {kept[1]} of 3 at 0.003 and {kept[2]} of 3 at 0.01 end"
    )
    assert words in rates
    survived = part(page, "How much of the Shakespeare gain survives a tuned plain Muon?")
    means = {
        arm: statistics.fmean(
            result(whole / "shakespeare", f"{arm}-s{seed}")["geometric_mean"]
            for seed in (17402, 17403, 17404)
        )
        for arm in ("muon-qk", "muon", "go-muon")
    }
    gains = [means["go-muon"] / means[arm] - 1 for arm in ("muon", "muon-qk")]
    assert (
        f"{100 * gains[0] / gains[1]:.0f} % of the gain against the Q/K interpretation" in survived
    )
    assert survived.count("% of the gain") == 1, "the race has other windows, so no share of it"
    lower = part(page, "Does the sweep's length hold Muon back in the races?")
    for task in ("ptb", "shakespeare"):
        plan = OPEN_QUESTIONS[f"muon-rate-{task}"]
        assert plan.steps == 600, "as long as the races that results/README.md declares"
        muon, go = (
            [result(whole / plan.experiment, f"{arm}-s{s}")["geometric_mean"] for s in plan.seeds]
            for arm in ("muon-0.02", "go-muon")
        )
        assert f"how much nearer Muon comes at lower rates (`{plan.experiment}`)." in page
        _, row = rows_of(lower, f"`{plan.experiment}`")
        share = statistics.fmean(go) / statistics.fmean(muon) - 1
        assert row[2:4] == ["Muon 0.02", f"{100 * share:+.2f} %".replace("-", "−")]


def test_every_figure_is_traced(page: str) -> None:
    section = part(page, "Where every figure comes from")
    for name in CAMPAIGNS:
        (row,) = rows_of(section, f"`{name}`")
        assert row[1].startswith("`gomuon ")
        assert row[2] == "`0123456789ab`"
    recorded = "`gomuon race --selection results/tune-ptb/selection.json --seeds 101-103`"
    assert recorded in section
    assert "made processor, 2 cores, 1 thread" in section
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_everything_declared_has_its_place() -> None:
    declared = {**EXPERIMENTS, **OPEN_QUESTIONS}
    assert set(declared) <= set(CAMPAIGNS)
    for name, plan in declared.items():
        assert (CAMPAIGNS[name].experiment, CAMPAIGNS[name].task) == (plan.experiment, plan.task)


def test_every_campaign_is_listed_beside_the_results() -> None:
    readme = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    for name in CAMPAIGNS:
        assert f"`{name}`" in readme, name


def test_means_and_intervals() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert math.isnan(estimate([1.0]).low)
    with pytest.raises(ValueError, match="nothing"):
        estimate([])
    share = relative_pairs([2.0, 4.0], [1.0, 2.0])
    assert share.mean == pytest.approx(-0.5)
    assert share.wins == 2


# ---- pictures and the command --------------------------------------------------------------------


def test_the_same_files_give_the_same_page_and_pictures(
    whole: Path, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in ("one", "two"):
        command = ["--results", str(whole), "--out", str(tmp_path / out)]
        assert main(command) == 0
    first, second = (
        {p.relative_to(tmp_path / out): p.read_bytes() for p in (tmp_path / out).rglob("*.*")}
        for out in ("one", "two")
    )
    assert first == second
    names = {path.as_posix() for path in first}
    wanted = {f"pictures/{name}{end}.svg" for name in picture_data.NAMES for end in ("", "-dark")}
    assert names == {"reproduction.md", *wanted}
    assert first[Path("reproduction.md")].decode() == page
    for name in picture_data.NAMES:
        assert f'src="pictures/{name}.svg"' in page
        assert len(first[Path(f"pictures/{name}.svg")]) < 400_000


def test_a_picture_goes_with_its_campaigns(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    assert main(["--results", str(whole), "--out", str(out)]) == 0
    results = tmp_path / "results"
    thin_campaign(results / "ptb", EXPERIMENTS["ptb"])
    assert main(["--results", str(results), "--out", str(out)]) == 0
    left = sorted(path.name for path in (out / "pictures").iterdir())
    assert left == ["trajectories-dark.svg", "trajectories.svg"]
    text = (out / "reproduction.md").read_text()
    assert text.count("<img") == 1
    assert "pictures/trajectories.svg" in text


def test_drawn_numbers_are_the_curves(whole: Path) -> None:
    evidence = read_evidence(whole)
    ptb, shakespeare = picture_data.loss_panels(evidence)
    (series,) = ptb.comparisons
    assert len(series.lines) == 3
    assert series.paper == ((250.5, -0.7386), (550.5, 0.0648), (950.5, -0.4764))
    assert len(shakespeare.comparisons) == 2
    study = evidence["ptb"]
    curves = [study.curve(study.arm(arm).runs[0]) for arm in ("muon", "go-muon")]
    assert curves[0] is not None
    assert curves[1] is not None
    means = [math.fsum(curve.loss[48:53]) / 5 for curve in curves if curve is not None]
    assert series.lines[0][50] == (510.0, round(100 * (means[1] / means[0] - 1), 4))
    panels = picture_data.ranking_panels(evidence)
    assert [panel.title for panel in panels][:2] == ["Penn Treebank", "Tiny Shakespeare"]
    assert panels[0].rows[0].mean == 0, "the best is where the axis begins"
    never = next(row for row in panels[2].rows if row.name == "AdamW")
    assert (never.values, never.mean, never.remark) == ((None, None, None), None, "never")


def test_one_method_far_behind_does_not_flatten_the_others() -> None:
    def panel(*means: float) -> picture_data.RankingPanel:
        rows = tuple(picture_data.RankingRow("a", (mean,), mean) for mean in means)
        return picture_data.RankingPanel("a", "b", None, rows)

    assert picture_data.axis_end(panel(0.0, 1.0, 2.0, 3.0)) == 3.0
    assert picture_data.axis_end(panel(0.0, 1.0, 2.0, 300.0)) == 4.0
    assert picture_data.axis_end(panel(0.0, 0.1)) == 0.1


def test_the_committed_page_and_pictures_are_what_the_results_say(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    assert main(["--results", str(ROOT / "results"), "--out", str(out)]) == 0
    made, kept = (
        (folder / "reproduction.md").read_text(encoding="utf-8") for folder in (out, ROOT / "docs")
    )
    assert kept == made, "run make evidence and commit docs"
    names = [{p.name for p in (folder / "pictures").glob("*")} for folder in (out, ROOT / "docs")]
    assert names[0] <= names[1]
    # The site's own, drawn by tools.site.
    assert all(name.startswith(("rates", "step-")) for name in names[1] - names[0])
    pinned = (ROOT / "constraints.txt").read_text()
    if f"matplotlib=={matplotlib.__version__}\n" in pinned:  # another one draws other letters
        for name in names[0]:
            drawn, committed = (folder / "pictures" / name for folder in (out, ROOT / "docs"))
            assert drawn.read_bytes() == committed.read_bytes(), name


@pytest.mark.parametrize(
    ("candidate", "free"),
    [
        ([1.0, 1.001, 0.999, 1.0005], True),
        ([0.98, 0.981, 0.979, 0.98], True),  # a lower loss costs nothing
        ([1.003, 1.0031, 1.0029, 1.003], False),  # the mean is above .2 %
        ([0.99, 1.012, 0.995, 1.006], False),  # the interval is too wide
    ],
)
def test_what_is_free_follows_the_declared_rule(candidate: list[float], free: bool) -> None:
    assert is_free(estimate([value - 1 for value in candidate])) is free


def test_what_is_free_is_judged_over_all_tasks_together(whole: Path, page: str) -> None:
    section = part(page, "What may be computed cheaply?")
    differences: list[float] = []
    for task in FAST_TASKS:
        values = {
            arm: [
                result(whole / f"fast-{task}", f"{arm}-s{seed}")["geometric_mean"]
                for seed in range(301, 306)
            ]
            for arm in ("exact", "rows-4")
        }
        mean = statistics.fmean(values["exact"])
        pairs = zip(values["exact"], values["rows-4"], strict=True)
        differences += [(b - a) / mean for a, b in pairs]
    (row,) = rows_of(section, "256 rows, K = 4")
    assert row[1] == f"{100 * statistics.fmean(differences):+.2f} %".replace("-", "−")
    assert row[3] == f"{sum(d < 0 for d in differences)} of 15"
    assert row[4] == ("free" if is_free(estimate(differences)) else "not shown free")
    evidence = read_evidence(whole)
    del evidence["fast-gpt"]
    lacking = over_all_tasks(evidence, "fast", FAST_TASKS, "exact", "rows-4")
    assert lacking is None, "a task that lacks leaves no verdict"


JUDGED = [
    ("preset", "Does the fast preset cost loss?", FAST_TASKS, PRESET_ARMS),
    ("blocks", "Do factors in blocks cost loss?", BLOCK_TASKS, BLOCK_ARMS),
]


@pytest.mark.parametrize(("name", "heading", "tasks", "arms"), JUDGED)
def test_presets_and_blocks_are_judged_over_all_tasks_together(
    name: str, heading: str, tasks: Any, arms: Any, whole: Path, page: str
) -> None:
    section, (control, *cheaper) = part(page, heading), arms
    seeds = OPEN_QUESTIONS[f"{name}-ptb"].seeds
    assert len(seeds) == 5
    for arm in cheaper:
        differences: list[float] = []
        for task in tasks:
            first, second = (
                [
                    result(whole / f"{name}-{task}", f"{one}-s{seed}")["geometric_mean"]
                    for seed in seeds
                ]
                for one in (control, arm)
            )
            pairs = zip(first, second, strict=True)
            differences += [(b - a) / statistics.fmean(first) for a, b in pairs]
        (row,) = rows_of(section, arms[arm][0])
        assert row[1] == f"{100 * statistics.fmean(differences):+.2f} %".replace("-", "−")
        assert row[3] == f"{sum(d < 0 for d in differences)} of {5 * len(tasks)}"
        assert row[4] == ("free" if is_free(estimate(differences)) else "not shown free")
    for task in tasks:
        rows = rows_of(section, f"`{name}-{task}`")
        assert [row[1] for row in rows] == [f"{arms[arm][0]}, lr 0.08" for arm in cheaper]


@pytest.mark.parametrize(("name", "heading", "tasks", "arms"), JUDGED)
def test_of_presets_and_blocks_nothing_is_said_before(
    name: str, heading: str, tasks: Any, arms: Any, whole: Path
) -> None:
    evidence = read_evidence(whole)
    for task in tasks:
        del evidence[f"{name}-{task}"]
    section = part("\n".join(open_questions.section(evidence)) + "\n", heading)
    for title, _ in list(arms.values())[1:]:
        (row,) = rows_of(section, title)
        assert row[1:] == ["not run yet", "–", "–", "–"]
    for task in tasks:
        assert {row[3] for row in rows_of(section, f"`{name}-{task}`")} == {"not run yet"}


@pytest.mark.parametrize(("arm", "title"), [(arm, made[0]) for arm, made in STATE_ARMS.items()][1:])
def test_state_in_fewer_bits_has_its_verdict(whole: Path, page: str, arm: str, title: str) -> None:
    first, second = (
        [result(whole / "state-ptb", f"{one}-s{seed}")["geometric_mean"] for seed in STATE_SEEDS]
        for one in ("float32", arm)
    )
    mean = statistics.fmean(first)
    differences = [(b - a) / mean for a, b in zip(first, second, strict=True)]
    (row,) = rows_of(part(page, "Does state in fewer bits cost loss?"), title)
    assert row[1] == f"{100 * statistics.fmean(differences):+.2f} %".replace("-", "−")
    assert row[3] == f"{sum(d < 0 for d in differences)} of 5"
    assert row[4] == ("free" if is_free(estimate(differences)) else "not shown free")


def test_state_in_fewer_bits_says_that_it_was_not_run(whole: Path) -> None:
    evidence = read_evidence(whole)
    del evidence["state-ptb"]
    section = "\n".join(open_questions.section(evidence))
    for title, _ in list(STATE_ARMS.values())[1:]:
        (row,) = rows_of(section, title)
        assert row[1:] == ["not run yet", "–", "–", "–"]


def test_each_method_arrives_at_its_better_rate(whole: Path, page: str) -> None:
    study = read_evidence(whole)["speed-ptb"]
    target, found = time_to_quality.arrivals(study)
    ends = {
        arm.name: statistics.fmean(
            time_to_quality.final_loss(curve)
            for run in arm.finished.values()
            if (curve := study.curve(run)) is not None
        )
        for arm in study.campaign.arms
        if arm.optimizer == "muon"
    }
    assert target.name == min(ends, key=lambda name: ends[name])
    assert [one.time for one in found] == sorted(one.time for one in found)
    assert len({one.arm.optimizer for one in found}) == len(found) == len(SPEED_RATES)
    place = {name: index for index, name in enumerate(study.campaign.timing or ())}
    for one in found:
        for arm in study.campaign.arms:
            if arm.optimizer == one.arm.optimizer:
                updates = time_to_quality.updates_to_final_loss(study, arm, target)
                assert updates is not None
                pace = (place[arm.name] + 1) / (place[target.name] + 1)
                if updates.mean is not None:
                    assert one.time <= updates.mean * pace * (1 + 1e-6)
    own = next(one for one in found if one.arm.optimizer == "go-muon")
    rival = next(one for one in found if one.arm.optimizer != "go-muon")
    section = part(page, "Seconds to tuned Muon's loss")
    assert f"Go-MUON takes {own.time / rival.time:.2f} of the time" in section


# ---- rates and routing ---------------------------------------------------------------------------


def held_out_of(whole: Path, campaign: str, arm: str) -> list[float]:
    seeds = OPEN_QUESTIONS[campaign].seeds
    return [result(whole / campaign, f"{arm}-s{seed}")["validation_loss"] for seed in seeds]


def test_adamws_best_rate_is_where_go_muon_is_judged(whole: Path, page: str) -> None:
    section = part(page, "Does AdamW's rate carry over?")
    means = {
        rate: statistics.fmean(held_out_of(whole, "nanogpt", f"adamw-{rate:g}"))
        for rate in NANOGPT_RATES
    }
    best = min(means, key=lambda rate: means[rate])
    (row,) = rows_of(section, f"{best:g} (AdamW's best)")
    ours = statistics.fmean(held_out_of(whole, "nanogpt", f"go-muon-{best:g}"))
    assert row[1:3] == [f"{means[best]:.5f}", f"{ours:.5f}"]
    assert f"At AdamW's best rate, {best:g}, Go-MUON is " in section


def test_the_default_pair_has_the_lowest_mean_over_tasks(whole: Path, page: str) -> None:
    section = part(page, "Which rate and momentum suit most tasks?")
    totals = {}
    for arm in (one for one in DEFAULTS[0].arms if one.name.startswith("m")):
        shares = []
        for plan in DEFAULTS:
            key = {"grokking": "grok_step", "nanogpt": "validation_loss"}.get(
                plan.task, "geometric_mean"
            )
            scores = {
                name: statistics.fmean(
                    result(whole / plan.experiment, f"{name}-s{seed}")[key] or plan.steps + 1
                    for seed in plan.seeds
                )
                for name in (a.name for a in plan.arms if a.name.startswith("m"))
            }
            shares.append(scores[arm.name] / min(scores.values()))
        totals[arm.title] = math.prod(shares) ** (1 / len(shares))
    for title, total in totals.items():
        (row,) = rows_of(section, title)
        assert row[-1] == f"{100 * (total - 1):+.2f} %".replace("-", "−")
    papers = totals["momentum 0.8, rate 0.08"]
    best = min(totals, key=lambda title: totals[title])
    assert ("stays" in section) == (1 - totals[best] / papers <= 0.01 or totals[best] == papers)


def test_convolutions_leave_the_matrices_only_where_the_interval_says_so(
    whole: Path, page: str
) -> None:
    section = part(page, "Depthwise convolutions and patch embeddings: matrices or AdamW?")
    for plan in ROUTING:
        best = {}
        for treatment in ("matrix", "adamw"):
            arms = [arm.name for arm in plan.arms if arm.name.startswith(treatment)]
            losses = [held_out_of(whole, plan.experiment, arm) for arm in arms]
            best[treatment] = min(losses, key=statistics.fmean)
        pairs = relative_pairs(best["matrix"], best["adamw"])
        leaves = pairs.mean < 0 and excludes_zero(pairs)
        assert ("so they go to AdamW." if leaves else "so they stay matrices.") in section


@pytest.mark.parametrize("module", [rates, routing])
def test_of_rates_and_routing_nothing_is_said_before(module: Any) -> None:
    said = "\n".join(module.section({}))
    assert "not run yet" in said
    assert "AdamW's best)" not in said
    assert "The lowest mean has" not in said
    assert "the loss is lower" not in said
