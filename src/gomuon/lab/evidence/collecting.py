"""Copy a campaign into ``results/`` in the form that is kept: small files, and nothing local."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from gomuon.lab import machine
from gomuon.lab.errors import LabError
from gomuon.lab.evidence import slots
from gomuon.lab.evidence.reading import SELECTION, Study, read_study
from gomuon.lab.evidence.thinning import thin, write_curve
from gomuon.lab.files import cannot_write, make_folder, read_json, write_json
from gomuon.lab.results.campaigns import PLAN, TIMING, Campaign, read_campaign
from gomuon.lab.results.runs import MANIFEST, RESULT, RESUMED, Run

REPORT = "report.md"
# A path from a root, a home or a drive: nobody else has it, and it may name a person.
LOCAL = re.compile(
    r"(?<![\w.\-/\\:])(?:/(?:[\w.\-]+/)+[\w.\-]+|~/[\w.\-/]+|[A-Za-z]:\\\w[\w\\.\-]*)"
)
PARTS = ("format", "config", "hashes", "versions", "machine", "commit", RESUMED)


def collect(folder: Path, results: Path, name: str = "") -> Study:
    """Copy the finished runs of a campaign, thinned, over whatever ``results`` had of it.

    Args:
        folder: a campaign, finished or not.
        results: where campaigns are kept.
        name: the place in ``results``; by default the folder's own name.

    Raises:
        LabError: a run is not of the plan, the name is not the campaign's, or a file holds a path
            of this machine. What ``results`` had then stays.
    """
    name = name or folder.resolve().name
    slots.find(name)
    campaign = read_campaign(folder)
    if not (folder / PLAN).is_file():
        raise LabError(f"{folder} is a single run, not a campaign: it has no {PLAN}")
    if campaign.foreign:
        raise LabError(
            f"{folder / 'runs' / campaign.foreign[0]} does not belong to {PLAN}; "
            "move it away, or name the campaign it is of"
        )
    place = results / name
    if place.exists() and not (place / PLAN).is_file():
        raise LabError(f"{place} is there and no campaign; move it away first")
    make_folder(results)
    fresh = results / f".{name}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _write(campaign, folder, fresh)
        read_study(fresh, name)  # held to itself before anything is replaced
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
            _copy(folder / name, read_json(folder / name), place / name)
    if (folder / REPORT).is_file():
        text = (folder / REPORT).read_text(encoding="utf-8")
        for line in text.splitlines():
            _refuse_local(line, folder / REPORT)
        (place / REPORT).write_text(text, encoding="utf-8")
    for run in finished:
        _write_run(run, place / "runs" / run.folder.name)


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
