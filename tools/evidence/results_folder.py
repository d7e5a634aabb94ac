"""Read the campaigns under ``results/`` back; what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.catalogue import EXPERIMENTS, OPEN_QUESTIONS
from gomuon.lab.experiments.selection import FILE as SELECTION
from gomuon.lab.experiments.selection import read_selection
from gomuon.lab.files import read_json
from gomuon.lab.results.campaigns import PLAN, Campaign, read_campaign
from gomuon.lab.results.pairing import require_pair
from gomuon.lab.results.runs import RESULT, Run, is_finished, read_manifest
from tools.evidence import campaign_list
from tools.evidence.consistency import check_result, check_selection, check_settings
from tools.evidence.studies import Study
from tools.evidence.thinned_curve import read_curve


def read_evidence(results: Path) -> dict[str, Study]:
    """Every campaign that is there, in the page's order."""
    return {
        name: read_study(results / name, name)
        for name in campaign_list.CAMPAIGNS
        if (results / name / PLAN).is_file()
    }


def read_study(folder: Path, name: str) -> Study:
    """One campaign folder.

    Args:
        folder: where it is.
        name: the folder of ``results/`` that it belongs in.

    Raises:
        LabError: it declares another campaign, or something in it contradicts something else.
    """
    plan = read_json(folder / PLAN)
    _check_plan(folder / PLAN, plan, name)
    campaign = with_current_titles(read_campaign(folder, load=load_without_metrics))
    if campaign.foreign:
        raise LabError(f"{folder / 'runs' / campaign.foreign[0]} does not belong to {PLAN}")
    path = folder / SELECTION
    selection = read_selection(path) if path.is_file() else None
    study = Study(name, campaign, plan, {}, selection)
    check_settings(study)
    for run in study.runs:
        curve = read_curve(run.folder)
        check_result(run, curve)
        if curve is not None:
            study.curves[run.folder.name] = curve
    for first, second in zip(campaign.tuning, campaign.tuning[1:], strict=False):
        require_pair(first, second)
    check_selection(study, path)
    return study


def _check_plan(path: Path, plan: dict[str, Any], name: str) -> None:
    expected = campaign_list.find(name)
    for field, wanted in (("experiment", expected.experiment), ("task", expected.task)):
        if plan.get(field) != wanted:
            raise LabError(
                f"{path}: its {field} is {plan.get(field)!r}, but the folder {name} is for "
                f"{wanted!r}; give the campaign's own name with --name"
            )
    argv = plan.get("argv", [])
    if not (isinstance(argv, list) and all(isinstance(word, str) for word in argv)):
        raise LabError(f"{path}: argv must be a list of words, not {argv!r}")


def with_current_titles(campaign: Campaign) -> Campaign:
    """The campaign with its arms called as the catalogue calls them today.

    plan.json keeps the titles as they were declared; the page must not use two for one arm.
    """
    declared = {**EXPERIMENTS, **OPEN_QUESTIONS}.get(campaign.experiment)
    titles = {} if declared is None else {arm.name: arm.title for arm in declared.arms}
    arms = (replace(arm, title=titles.get(arm.name, arm.title)) for arm in campaign.arms)
    return replace(campaign, arms=tuple(arms))


def load_without_metrics(folder: Path) -> Run:
    """A finished run; its metrics are not kept under ``results/``."""
    manifest = read_manifest(folder)
    if not is_finished(folder):
        raise LabError(f"{folder} has no {RESULT}; only finished runs belong here, collect again")
    result = read_json(folder / RESULT)
    if not isinstance(result.get("steps"), int):
        raise LabError(f"{folder / RESULT}: steps is {result.get('steps')!r}, not a number")
    return Run.from_manifest(folder, manifest, result, metrics=[], timing=[])
