"""An experiment on a corpus: the paper's losses beside ours, then candidate minus control."""

from __future__ import annotations

from collections.abc import Sequence

from gomuon.lab import formatting as w
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.experiments.plan import Arm, Plan
from gomuon.lab.results.statistics import paired
from tools.evidence.estimates import all_finite, estimate, relative, relative_pairs
from tools.evidence.markdown_tables import (
    DIVERGED,
    NOT_RUN,
    measure_name,
    percent_interval,
    plain_interval,
    table,
    text,
)
from tools.evidence.paper_lookup import (
    published_difference,
    published_gain,
    published_loss,
    published_wins,
)
from tools.evidence.studies import TRAJECTORY, Study, recorded_loss

FIGURES = ("measure", "paper", "here", "95 % interval", "here against paper")
PAIRS = ("measure", "difference", "relative", "95 % interval", "lower on", "paper", "paper's pairs")


def section(name: str, study: Study | None) -> list[str]:
    """Means of every arm, then candidate minus control."""
    plan = EXPERIMENTS[name]
    blocks = [
        "Mean training loss before each update, in three windows of updates, and the geometric "
        "mean of the three; averaged over seeds. Lower is better.",
        table(("arm", *FIGURES), _arm_rows(name, plan, study), left=2),
    ]
    tuned = [f"{arm.name}-lr{rate:g}" for arm in plan.arms for rate in arm.grid]
    if tuned:
        blocks += [
            f"The runs on tuning seed {plan.tuning_seed}, one of each, so without an interval.",
            table(("run", *FIGURES), _tuning_rows(name, tuned, plan, study), left=2),
            *_selected(plan, study),
        ]
    for control, candidate in plan.comparisons:
        titles = {arm.name: arm.title for arm in plan.arms}
        blocks += [
            f"{text(titles[candidate])} minus {text(titles[control])}, paired by seed; negative "
            "means lower loss. Relative figures and their interval are in units of the control's "
            "mean.",
            table(
                (*PAIRS, *(f"seed {seed}" for seed in _seeds(plan, study))),
                _pair_rows(name, control, candidate, study),
            ),
        ]
    return blocks


def _measures(plan: Plan) -> list[str]:
    return [*(window_name(window) for window in plan.windows), TRAJECTORY]


def _arm_rows(name: str, plan: Plan, study: Study | None) -> list[list[str]]:
    rows = []
    for arm in plan.arms:
        for i, measure in enumerate(_measures(plan)):
            values = [] if study is None else _values(study, arm.name, measure)
            head = _head(arm, study) if i == 0 else ""
            rows.append([head, *_figures(values, published_loss(name, arm.name, measure), measure)])
    return rows


def _values(study: Study, arm: str, measure: str) -> list[float]:
    return study.losses(arm, measure, study.seeds_of(arm)) if study.has(arm) else []


def _head(arm: Arm, study: Study | None) -> str:
    """The arm's title with its rate; a selected rate is known only once it has run."""
    found = study.arm(arm.name).rate if study is not None and study.has(arm.name) else arm.lr
    return f"{text(arm.title)}, lr {w.rate(found)}"


def _figures(values: Sequence[float], paper: float | None, measure: str) -> list[str]:
    if not values:
        return [measure_name(measure), w.loss(paper), NOT_RUN, w.ABSENT, w.ABSENT]
    if not all_finite(values):
        return [measure_name(measure), w.loss(paper), DIVERGED, w.ABSENT, w.ABSENT]
    found = estimate(values)
    against = w.ABSENT if paper is None else w.percent(relative(found.mean, paper))
    interval = plain_interval(found.low, found.high)
    return [measure_name(measure), w.loss(paper), w.loss(found.mean), interval, against]


def _tuning_rows(
    name: str, tuned: Sequence[str], plan: Plan, study: Study | None
) -> list[list[str]]:
    runs = {} if study is None else {run.config.arm: run for run in study.campaign.tuning}
    rows = []
    for arm in tuned:
        for measure in _measures(plan):
            paper, run = published_loss(name, arm, measure), runs.get(arm)
            # Without a figure of the paper's to compare with, a run has one line.
            if paper is None and measure != TRAJECTORY:
                continue
            values = [] if run is None else [recorded_loss(run, measure)]
            head = arm.replace("-lr", ", lr ")
            rows.append([text(head), *_figures(values, paper, measure)])
    return rows


def _seeds(plan: Plan, study: Study | None) -> tuple[int, ...]:
    return plan.seeds if study is None else study.campaign.seeds


def _selected(plan: Plan, study: Study | None) -> list[str]:
    """The rate that each tuned arm took, and whether it lies at an end of its grid."""
    lines = []
    for arm in plan.arms:
        rate = None if study is None or not study.has(arm.name) else study.arm(arm.name).rate
        if arm.lr is None and rate is not None:
            end = rate in (min(arm.grid), max(arm.grid))
            where = (
                "an end of its grid, so a better one may lie beyond" if end else "inside its grid"
            )
            lines.append(f"{text(arm.title)} took {rate:g}, {where}.")
    return lines


def _pair_rows(name: str, control: str, candidate: str, study: Study | None) -> list[list[str]]:
    rows = []
    plan = EXPERIMENTS[name]
    for measure in _measures(plan):
        share = published_gain(name, control, candidate, measure)
        difference = published_difference(name, control, candidate, measure)
        paper = [w.ABSENT, w.ABSENT]
        if share is not None and difference is not None:
            won = published_wins(name, measure) or w.ABSENT
            paper = [f"{w.signed(difference)}, {w.percent(share)}", won]
        here, by_seed = _pair(study, control, candidate, measure)
        each = [by_seed.get(seed, w.ABSENT) for seed in _seeds(plan, study)]
        rows.append([measure_name(measure), *here, *paper, *each])
    return rows


def _pair(
    study: Study | None, control: str, candidate: str, measure: str
) -> tuple[list[str], dict[int, str]]:
    """The mean difference in four cells, and the difference on every seed."""
    seeds = []
    if study is not None and study.has(control, candidate):
        seeds = study.seeds_of(control, candidate)
    if study is None or not seeds:
        return [NOT_RUN, *[w.ABSENT] * 3], {}
    first, second = (study.losses(arm, measure, seeds) for arm in (control, candidate))
    if not all_finite([*first, *second]):
        return [DIVERGED, *[w.ABSENT] * 3], {}
    found, share = paired(first, second), relative_pairs(first, second)
    cells = [
        w.signed(found.mean),
        w.percent(share.mean),
        percent_interval(share.low, share.high),
        f"{share.wins} of {len(seeds)}",
    ]
    each = [w.signed(difference) for difference in found.differences]
    return cells, dict(zip(seeds, each, strict=True))
