"""Campaigns that do not fit are refused with one line that names the file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.report.writing import write_report
from gomuon.lab.results.pairing import FIELDS
from tests.lab.helpers.made_campaigns import race, short, write_campaign, write_lines
from tests.lab.helpers.reports import Tags, edit_json, reported


@pytest.mark.parametrize("kind", ["empty", "absent", "file"])
def test_a_folder_that_is_neither_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if kind == "empty":
        folder.mkdir()
    if kind == "file":
        folder.write_text("")
    with pytest.raises(LabError, match="neither a campaign nor a run") as caught:
        write_report(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "text"), [(60, '{"step": 60, "lo'), (7, "nonsense")])
def test_a_damaged_line_of_a_finished_run_is_named(line: int, text: str, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", short("ptb", seeds=(0,)))
    path = folder / "runs" / "go-muon-s0" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + ("" if line == 60 else "\n"))
    with pytest.raises(LabError, match=f"line {line}") as caught:
        write_report(folder)
    assert str(path) in str(caught.value)
    assert not (folder / "report.md").exists()
    assert not (folder / "report.html").exists()


def test_a_line_without_its_numbers_is_refused(tmp_path: Path) -> None:
    for plan, line in ((short("ptb", seeds=(0,)), {"step": 1}), (race(steps=5), {"step": 1})):
        folder = write_campaign(tmp_path / plan.experiment, plan)
        run = folder / "runs" / "go-muon-s0"
        write_lines(run / "metrics.jsonl", [line] * plan.steps)
        with pytest.raises(LabError, match=r"metrics\.jsonl"):
            write_report(folder)


@pytest.mark.parametrize("field", FIELDS)
def test_runs_whose_hashes_differ_are_not_compared(field: str, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    (folder / "report.html").write_text("an earlier report")
    path = folder / "runs" / "muon-s0" / "manifest.json"
    hashes = json.loads(path.read_text())["hashes"]
    edit_json(path, hashes={**hashes, field: "0" * 64})
    with pytest.raises(LabError, match=rf"may not be compared: their {field} hashes differ"):
        write_report(folder)
    assert (folder / "report.html").read_text() == "an earlier report"
    del hashes[field]
    edit_json(path, hashes=hashes)
    with pytest.raises(LabError, match=field):
        write_report(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("arm", "other"), ("seed", 5), ("lr", 0.5), ("steps", 21), ("optimizer", "adamw")),
        *(("task", "ptb"), ("label", "quick"), ("options", {"alpha": 0.5})),
    ],
)
def test_a_run_of_another_plan_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    path = folder / "runs" / "muon-s0" / "manifest.json"
    edit_json(path, config={**json.loads(path.read_text())["config"], field: value})
    with pytest.raises(LabError, match=rf"muon-s0: its {field} is .* declares"):
        write_report(folder)


def test_a_shortened_result_is_refused(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    run = folder / "runs" / "muon-s0"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:10]))
    edit_json(run / "result.json", steps=10)
    with pytest.raises(LabError, match="10 of 20 updates"):
        write_report(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": "many"}, "not a valid plan"),
        ({"arms": [{}]}, "is missing"),
        ({"arms": 3}, "not a valid plan"),
        ({"windows": ["9-3"]}, "window '9-3' is empty"),
        ({"windows": ["all"]}, "not a valid plan"),
        ({"comparisons": [["muon", "nobody"]]}, "'nobody', which is not an arm"),
        ({"comparisons": ["muon"]}, "not a valid plan"),
        ({"steps": "ten"}, "declares 'ten'"),
    ],
)
def test_a_damaged_plan_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    edit_json(folder / "plan.json", **changes)
    with pytest.raises(LabError, match=message):
        write_report(folder)


@pytest.mark.parametrize("field", ["arms", "seeds", "windows", "task", "rule", "title"])
def test_a_missing_field_of_a_plan_is_named(field: str, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    plan = json.loads((folder / "plan.json").read_text())
    del plan[field]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(LabError, match=f"field '{field}' is missing"):
        write_report(folder)


def test_a_damaged_timing_is_refused(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    (folder / "timing.json").write_text('{"arms": 3}')
    with pytest.raises(LabError, match="not a valid timing file"):
        write_report(folder)


def test_an_arm_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    plan = json.loads((folder / "plan.json").read_text())
    plan["arms"][0]["name"] = "../../elsewhere"
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(LabError, match="not a folder name"):
        write_report(folder)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a | b\n# c",
    "[x](javascript:alert(1)) ![y](https://example.invalid/z)",
    "$\\frac{ & </style>",
    "\ud800 \x00 名前",
)


@pytest.mark.parametrize("task", ["grokking", "ptb"])
@pytest.mark.parametrize("names", [HOSTILE[:3], HOSTILE[3:]])
def test_names_from_a_folder_stay_text(names: tuple[str, ...], task: str, tmp_path: Path) -> None:
    windows = ((5, 8), (11, 14), (17, 20)) if task == "ptb" else ()
    plan = race(steps=20, task=task, windows=windows, seeds=(0, 1))
    pairs = zip(plan.arms, names, strict=True)
    arms = tuple(dataclasses.replace(arm, title=f"{arm.title} {name}") for arm, name in pairs)
    every = " ".join(names)
    folder = write_campaign(tmp_path / "c", dataclasses.replace(plan, arms=arms))
    edit_json(
        folder / "plan.json", title=every, experiment=every, statistic=every, rule=f"1. {every}"
    )
    manifest = folder / "runs" / "muon-s0" / "manifest.json"
    edit_json(manifest, versions={every: every}, machine={every: every}, commit=every)
    for name in names:
        if "/" not in name and "\x00" not in name:
            (folder / "runs" / name).mkdir()
    (folder / "runs" / os.fsdecode(b"\xff<b>")).mkdir()
    markdown, page = reported(folder)

    tags = Tags(page)
    allowed = {"html", "head", "meta", "link", "title", "style", "body", "main", "p", "h1", "h2"}
    allowed |= {"ol", "li", "span", "section", "figure", "picture", "source", "img", "figcaption"}
    allowed |= {"div", "table", "thead", "tbody", "tr", "th", "td", "strong", "dl", "dt", "dd"}
    assert {tag for tag, _ in tags.found} <= allowed | {"details", "summary"}
    assert not [key for _, attributes in tags.found for key in attributes if key.startswith("on")]
    assert page.count("</style>") == 1
    assert "alert(1)" in " ".join(tags.text) or names is not HOSTILE[:3]  # shown, not dropped

    assert "<" not in markdown
    assert not re.search(r"(?<!\\)\]\(", markdown)
    assert "https://" not in markdown
    rows = markdown.split("## Which hashes agree")[1].splitlines()
    widths = {len(row.replace("\\|", "").strip("|").split("|")) for row in rows if row[:1] == "|"}
    assert len(widths) == 1  # an unescaped bar would widen its row


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", race(steps=20))
    (folder / "report.html").mkdir()
    (folder / "report.html" / "occupied").write_text("")
    with pytest.raises(LabError, match=r"cannot write .*report\.html"):
        write_report(folder)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
