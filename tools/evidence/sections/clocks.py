"""When the geometry is renewed: clocks that adapt, and whether observing or holding matters."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.experiments.clock_plans import (
    ADAPTIVE,
    COHERENCE,
    COHERENCE_ARMS,
    LOSS,
    ONE_THING,
    PAPERS,
    REFRESHES,
    TARGETS,
)
from gomuon.lab.results.statistics import Paired
from tools.evidence.campaign_list import TITLES
from tools.evidence.estimates import all_finite, excludes_zero, relative_pairs
from tools.evidence.markdown_tables import (
    DIVERGED,
    NOT_RUN,
    code,
    lower_or_higher,
    percent_interval,
    table,
    text,
)
from tools.evidence.studies import Evidence, Study, score


def section(evidence: Evidence) -> list[str]:
    return [
        "### Can the geometry say when it must be renewed?",
        "`refresh_every=Adaptive(target)`: layers that share an input double their interval while "
        "the cosine between the steps of cached and of fresh maps is at least the target, and "
        "halve it otherwise ([adaptive.md](adaptive.md)). Against fixed intervals, paired by seed; "
        "the statistic is the geometric mean of the windows, and of modular addition the grok "
        "step. The rule, declared before the runs: worth it with at most half the refreshes of "
        "K = 4 and a mean at most .3 % above.",
        *(
            block
            for plan in ADAPTIVE
            for block in _clocks(evidence.get(plan.experiment), plan.experiment, plan.task)
        ),
        "### Is it sparse observation or holding that helps?",
        "With K = 4 factors are observed every fourth step, and maps are held for four steps. "
        "These arms have one of both, or change something else about the holding. The rule, "
        "declared before the runs: a cause is found where the interval of the pair that differs in "
        "it alone excludes zero on both texts, with one sign.",
        *_coherence(evidence),
    ]


# ---- clocks that adapt ---------------------------------------------------------------------------


def scores(study: Study, arm: str) -> list[float]:
    """The statistic of an arm's runs, seed by seed; NaN if one diverged."""
    runs = study.arm(arm).runs
    found = [score(runs[seed]) for seed in study.campaign.seeds]
    return [math.nan if value is None else value for value in found]


def difference(study: Study, control: str, candidate: str) -> Paired | None:
    """The paired relative difference; None if a run diverged."""
    first, second = scores(study, control), scores(study, candidate)
    return relative_pairs(first, second) if all_finite([*first, *second]) else None


def refreshes(study: Study, arm: str) -> float | None:
    """The maps that were renewed in a run, averaged over seeds; None if they were not counted."""
    counts = [(run.result or {}).get("refreshes") for run in study.arm(arm).finished.values()]
    known = [float(count) for count in counts if count is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(counts) else None


def share_of_refreshes(study: Study, arm: str) -> float | None:
    """An arm's refreshes as a share of those with K = 4."""
    own, papers = refreshes(study, arm), refreshes(study, PAPERS)
    return None if own is None or not papers else own / papers


def _clocks(study: Study | None, name: str, task: str) -> list[str]:
    title = f"{TITLES[task]} ({code(name)})"
    if study is None or study.shortcoming is not None:
        return [f"{title}: {NOT_RUN if study is None else study.shortcoming}."]
    rows = []
    for arm in study.campaign.arms:
        share, own = share_of_refreshes(study, arm.name), scores(study, arm.name)
        found = None if arm.name == PAPERS else difference(study, PAPERS, arm.name)
        mean = math.fsum(own) / len(own)
        rows.append(
            [
                text(arm.title),
                w.ABSENT if share is None else f"{100 * share:.0f} %",
                w.loss(mean) if math.isfinite(mean) else DIVERGED,
                *_cells(found),
            ]
        )
    heads = (title, "refreshes of K = 4", "mean", "against K = 4", "95 % interval", "lower on")
    return [table(heads, rows), " ".join(_verdict(study, f"adaptive-{t:g}") for t in TARGETS)]


def _cells(found: Paired | None) -> list[str]:
    if found is None:
        return [w.ABSENT] * 3
    wins = f"{found.wins} of {len(found.differences)}"
    return [w.percent(found.mean), percent_interval(found.low, found.high), wins]


def _verdict(study: Study, arm: str) -> str:
    title = text(study.arm(arm).title)
    share, found = share_of_refreshes(study, arm), difference(study, PAPERS, arm)
    if found is None:
        return f"A run of {title} or of K = 4 diverged."
    if share is None:
        return f"The refreshes of {title} were not counted."
    kept = share <= REFRESHES and found.mean <= LOSS
    return (
        f"{title} makes {100 * share:.0f} % of the refreshes of K = 4, and its mean is "
        f"{lower_or_higher(found.mean)}: {'worth it' if kept else 'not worth it'} by the rule."
    )


# ---- observing or holding ------------------------------------------------------------------------


def _coherence(evidence: Evidence) -> list[str]:
    rows = []
    for plan in COHERENCE:
        study = evidence.get(plan.experiment)
        whole = study is not None and study.shortcoming is None
        for (control, candidate), what in ONE_THING.items():
            start = [code(plan.experiment), what, _title(candidate), _title(control)]
            if study is None or not whole:
                reason = NOT_RUN if study is None else str(study.shortcoming)
                rows.append([*start, reason, w.ABSENT, w.ABSENT])
                continue
            found = difference(study, control, candidate)
            rows.append([*start, *(_cells(found) if found else [DIVERGED, w.ABSENT, w.ABSENT])])
    heads = ("campaign", "what differs", "arm", "against", "relative", "95 % interval", "lower on")
    return [table(heads, rows, left=4), _causes(evidence)]


def _title(arm: str) -> str:
    return text(COHERENCE_ARMS[arm][0])


def cause(evidence: Evidence, control: str, candidate: str) -> list[Paired] | None:
    """The differences on both texts; None if one lacks."""
    found = []
    for plan in COHERENCE:
        study = evidence.get(plan.experiment)
        if study is None or study.shortcoming is not None:
            return None
        pairs = difference(study, control, candidate)
        if pairs is None:
            return None
        found.append(pairs)
    return found


def is_cause(found: list[Paired]) -> bool:
    """The declared rule."""
    return all(map(excludes_zero, found)) and len({pairs.mean < 0 for pairs in found}) == 1


def _causes(evidence: Evidence) -> str:
    sentences = []
    for (control, candidate), what in ONE_THING.items():
        found = cause(evidence, control, candidate)
        if found is None:
            continue
        shares = " and ".join(lower_or_higher(pairs.mean) for pairs in found)
        said = "matters" if is_cause(found) else "is not shown to matter"
        sentences.append(f"{what[0].upper()}{what[1:]}: {shares}; by the rule this {said}.")
    return " ".join(sentences)
