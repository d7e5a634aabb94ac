"""Copy a campaign into ``results/``: small files, and no path of the machine it ran on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gomuon.lab import machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.selection import FILE as SELECTION
from gomuon.lab.files import cannot_write, make_folder, read_json, write_json
from gomuon.lab.results.campaigns import PLAN, TIMING, Campaign, read_campaign
from gomuon.lab.results.runs import MANIFEST, RESULT, RESUMED, Run
from tools.evidence import campaign_list
from tools.evidence.results_folder import read_study
from tools.evidence.studies import Study
from tools.evidence.thinned_curve import thin, write_curve

REPORT = "report.md"
# A path from a root, a home or a drive: it means nothing elsewhere and may name a person.
LOCAL = re.compile(
    r"(?<![\w.\-/\\:])(?:/(?:[\w.\-]+/)+[\w.\-]+|~/[\w.\-/]+|[A-Za-z]:\\\w[\w\\.\-]*)"
)
# Where files are on one machine; the runs do not depend on it.
PLACE_FLAGS = ("--out", "--data-dir")
PARTS = ("format", "config", "hashes", "versions", "machine", "commit", RESUMED)


def collect(folder: Path, results: Path, name: str = "") -> Study:
    """Copy the finished runs of a campaign, thinned, over whatever ``results`` had of it.

    Args:
        folder: a campaign, finished or not.
        results: where campaigns are kept.
        name: its folder in ``results``; by default the campaign folder's own name.

    Raises:
        LabError: a run is not of the plan, the name is not the campaign's, or a file holds a path
            of this machine. What ``results`` had then stays.
    """
    name = name or folder.resolve().name
    campaign_list.find(name)
    campaign = read_campaign(folder)
    if not (folder / PLAN).is_file():
        raise LabError(f"{folder} is a single run, not a campaign: it has no {PLAN}")
    if campaign.foreign:
        raise LabError(
            f"{folder / 'runs' / campaign.foreign[0]} does not belong to {PLAN}; "
            "move that run to another folder and collect again"
        )
    place = results / name
    if place.exists() and not (place / PLAN).is_file():
        raise LabError(f"{place} exists and is no campaign; move it away first")
    make_folder(results)
    fresh = results / f".{name}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _write(campaign, folder, fresh)
        read_study(fresh, name)  # checked before anything is replaced
        shutil.rmtree(place, ignore_errors=True)
        fresh.replace(place)
    except OSError as error:
        raise cannot_write(place, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read_study(place, name)


def _write(campaign: Campaign, folder: Path, place: Path) -> None:
    runs = [*campaign.tuning, *(run for arm in campaign.arms for run in arm.runs.values())]
    finished = [run for run in runs if run.finished]
    if not finished:
        raise LabError(f"{folder} has no finished run yet; there is nothing to collect")
    place.mkdir(parents=True)
    for name in (PLAN, SELECTION, TIMING):
        if (folder / name).is_file():
            content = read_json(folder / name)
            if name == PLAN and "argv" in content:
                content["argv"] = without_places(content["argv"])
            _copy(folder / name, content, place / name)
    if (folder / REPORT).is_file():
        text = (folder / REPORT).read_text(encoding="utf-8")
        for line in text.splitlines():
            _refuse_local(line, folder / REPORT)
        (place / REPORT).write_text(text, encoding="utf-8")
    for run in finished:
        _write_run(run, place / "runs" / run.folder.name)


def without_places(argv: Sequence[str]) -> list[str]:
    """A recorded command without the folders of one machine."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in PLACE_FLAGS:
            next(words, None)  # its value
        elif not word.startswith(tuple(f"{flag}=" for flag in PLACE_FLAGS)):
            kept.append(word)
    return kept


def _write_run(run: Run, place: Path) -> None:
    place.mkdir(parents=True)
    manifest = read_json(run.folder / MANIFEST)
    kept = {part: manifest[part] for part in PARTS if part in manifest}
    if "machine" in kept:
        kept["machine"] = machine.comparable(kept["machine"])
    _copy(run.folder / MANIFEST, kept, place / MANIFEST)
    _copy(run.folder / RESULT, run.result, place / RESULT)
    write_curve(place, thin(run.metrics, run.config))


def _copy(source: Path, value: Any, target: Path) -> None:
    _refuse_local(value, source)
    write_json(target, value)


def _refuse_local(value: Any, source: Path) -> None:
    """Raise a LabError if a text anywhere in the value holds a path of one machine."""
    if isinstance(value, str):
        found = LOCAL.search(value)
        if found is not None:
            raise LabError(
                f"{source} holds {found[0]!r}, a path of this machine, which does not belong "
                "among results; remove it there and collect again"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_local(key, source)
            _refuse_local(item, source)
    elif isinstance(value, list):
        for item in value:
            _refuse_local(item, source)
