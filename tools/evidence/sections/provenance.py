"""Where every figure comes from: folder, command, commit, seeds, versions and machine."""

from __future__ import annotations

from collections.abc import Iterable

from gomuon.lab import formatting as w
from gomuon.lab import machine
from gomuon.lab.results.runs import Resumption, Run
from tools.evidence.campaign_list import CAMPAIGNS
from tools.evidence.markdown_tables import NOT_RUN, code, table, text
from tools.evidence.studies import Evidence, Study

PACKAGES = ("gomuon", "torch", "python", "numpy")


def source(name: str, evidence: Evidence) -> str:
    """The line under a heading that says where its figures come from."""
    study = evidence.get(name)
    if study is None:
        return f"{code(f'results/{name}')}: {NOT_RUN}."
    state = f"{w.many(len(study.runs), 'run')} of {study.declared}"
    if study.shortcoming is not None:
        state += "; nothing is concluded that needs the missing ones"
    return (
        f"{code(f'results/{name}')}: {state}, {w.seeds(study.campaign.seeds)}, commit "
        f"{_commits(study)}, made by {_command(study)}."
    )


def section(evidence: Evidence) -> list[str]:
    rows = []
    for name in CAMPAIGNS:
        study = evidence.get(name)
        if study is None:
            rows.append([code(name), NOT_RUN, *[w.ABSENT] * 5])
            continue
        rows.append(
            [
                code(name),
                _command(study),
                _commits(study),
                _seeds(study),
                f"{len(study.runs)} of {study.declared}",
                _versions(study),
                _machines(study),
            ]
        )
    heads = ("folder", "command", "commit", "seeds", "runs", "versions", "machine")
    return [
        "Each folder under `results/` holds the plan as it was declared before the first update, "
        "and per run `manifest.json` (configuration, hashes, versions, machine, commit), "
        "`result.json` (windows or grok step, and the sha256 of the metrics it was computed from) "
        "and `curve.json` (means over ten updates). Commands start from the root of a clone.",
        table(heads, rows, left=len(heads)),
    ]


def _command(study: Study) -> str:
    return "a command that was not recorded" if study.command is None else code(study.command)


def _commits(study: Study) -> str:
    found = _distinct(place.commit for place in _places(study))
    return ", ".join(code(machine.short_commit(str(commit))) for commit in found) or "unknown"


def _seeds(study: Study) -> str:
    seeds = [str(seed) for seed in study.campaign.seeds]
    tuning = study.plan.get("tuning_seed")
    return ", ".join(seeds) + ("" if tuning is None else f"; tuning {tuning}")


def _versions(study: Study) -> str:
    found = _distinct(
        ", ".join(f"{name} {place.versions[name]}" for name in PACKAGES if name in place.versions)
        for place in _places(study)
    )
    return text("; ".join(found)) or w.ABSENT


def _machines(study: Study) -> str:
    found = _distinct(
        f"{place.machine.get('processor', 'unknown')}, {place.machine.get('cores', '?')} cores, "
        f"{w.many(int(place.machine.get('threads', study.plan['threads'])), 'thread')}"
        for place in _places(study)
    )
    return text("; ".join(found)) or w.ABSENT


def _places(study: Study) -> list[Run | Resumption]:
    """Runs and their continuations: each has a commit, versions and a machine."""
    found: list[Run | Resumption] = list(study.runs)
    for run in study.runs:
        found += run.resumed
    return found


def _distinct(values: Iterable[str | None]) -> list[str]:
    return [value for value in dict.fromkeys(values) if value is not None]
