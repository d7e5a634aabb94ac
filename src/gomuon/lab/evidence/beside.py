"""The paper's figures beside ours, experiment by experiment."""

from __future__ import annotations

from collections.abc import Sequence

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.reading import TRAJECTORY, Study, measured
from gomuon.lab.evidence.tables import table, text
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.experiments.plan import Arm, Plan
from gomuon.lab.experiments.published import PublishedResults
from gomuon.lab.results.statistics import paired

# Differences that the text prints; the others follow from the means of its tables.
PRINTED = {
    ("ptb", "501-600"): 0.00083,
    ("lazy", "501-600"): -0.00119,
    ("lazy", "901-1000"): -0.00320,
}
# Pairs won that its sentences give, beside those of its tables.
WON = {
    ("ptb", TRAJECTORY): "3 of 3",
    **{("shakespeare", window): "3 of 3" for window in ("201-300", "501-600", "901-1000")},
}
FIGURES = ("measure", "paper", "here", "95 % interval", "here against paper")
PAIRS = ("measure", "difference", "relative", "95 % interval", "lower on", "paper", "paper's pairs")


def figures_of(name: str) -> PublishedResults:
    found = EXPERIMENTS[name].paper
    if found is None:
        raise ValueError(f"the paper prints nothing for {name}")
    return found


def measures(plan: Plan) -> list[str]:
    return [*(window_name(window) for window in plan.windows), TRAJECTORY]


def shown(measure: str) -> str:
    return measure.replace("-", "–") if measure != TRAJECTORY else measure


def printed(name: str, arm: str, measure: str) -> float | None:
    """What the paper prints for an arm."""
    paper = figures_of(name)
    if measure == TRAJECTORY:
        return paper.geometric_mean.get(arm)
    return paper.windows.get(arm, {}).get(measure)


def printed_share(name: str, control: str, candidate: str, measure: str) -> float | None:
    """The paper's relative difference, from the means it prints; negative favours Go-MUON."""
    a, b = (printed(name, arm, measure) for arm in (control, candidate))
    return None if a is None or b is None else n.relative(b, a)


def language(name: str, study: Study | None) -> list[str]:
    """An experiment on a corpus: means of every arm, then candidate against control."""
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


def _arm_rows(name: str, plan: Plan, study: Study | None) -> list[list[str]]:
    rows = []
    for arm in plan.arms:
        for i, measure in enumerate(measures(plan)):
            values = [] if study is None else _values(study, arm.name, measure)
            head = _head(arm, study) if i == 0 else ""
            rows.append([head, *_figures(values, printed(name, arm.name, measure), measure)])
    return rows


def _values(study: Study, arm: str, measure: str) -> list[float]:
    return study.losses(arm, measure, study.seeds_of(arm)) if study.has(arm) else []


def _head(arm: Arm, study: Study | None) -> str:
    """The arm's title with its rate, which a selected one has only once it has run."""
    found = study.arm(arm.name).rate if study is not None and study.has(arm.name) else arm.lr
    return f"{text(arm.title)}, lr {w.rate(found)}"


def _figures(values: Sequence[float], paper: float | None, measure: str) -> list[str]:
    if not values:
        return [shown(measure), w.loss(paper), n.NOT_RUN, w.ABSENT, w.ABSENT]
    if not n.known(values):
        return [shown(measure), w.loss(paper), n.DIVERGED, w.ABSENT, w.ABSENT]
    found = n.estimate(values)
    against = w.ABSENT if paper is None else w.percent(n.relative(found.mean, paper))
    interval = n.plain_interval(found.low, found.high)
    return [shown(measure), w.loss(paper), w.loss(found.mean), interval, against]


def _tuning_rows(
    name: str, tuned: Sequence[str], plan: Plan, study: Study | None
) -> list[list[str]]:
    runs = {} if study is None else {run.config.arm: run for run in study.campaign.tuning}
    rows = []
    for arm in tuned:
        for measure in measures(plan):
            paper, run = printed(name, arm, measure), runs.get(arm)
            # The paper prints few of these; a run of ours without its figure is one line.
            if paper is None and measure != TRAJECTORY:
                continue
            values = [] if run is None else [measured(run, measure)]
            head = arm.replace("-lr", ", lr ")
            rows.append([text(head), *_figures(values, paper, measure)])
    return rows


def _seeds(plan: Plan, study: Study | None) -> tuple[int, ...]:
    return plan.seeds if study is None else study.campaign.seeds


def _selected(plan: Plan, study: Study | None) -> list[str]:
    """Which rate each arm took that was to be selected, and whether a better one may lie beyond."""
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
    plan, wins = EXPERIMENTS[name], figures_of(name).wins
    for measure in measures(plan):
        share = printed_share(name, control, candidate, measure)
        a, b = (printed(name, arm, measure) for arm in (control, candidate))
        difference = PRINTED.get((name, measure), None if a is None or b is None else b - a)
        paper = (
            w.ABSENT
            if share is None or difference is None
            else f"{w.signed(difference)}, {w.percent(share)}"
        )
        won = WON.get((name, measure)) or wins.get(measure, w.ABSENT).replace("/", " of ")
        beside = [paper, w.ABSENT if share is None else won]
        here, by_seed = _pair(study, control, candidate, measure)
        each = [by_seed.get(seed, w.ABSENT) for seed in _seeds(plan, study)]
        rows.append([shown(measure), *here, *beside, *each])
    return rows


def _pair(
    study: Study | None, control: str, candidate: str, measure: str
) -> tuple[list[str], dict[int, str]]:
    """The mean difference in four cells, and the difference on every seed."""
    seeds = []
    if study is not None and study.has(control, candidate):
        seeds = study.seeds_of(control, candidate)
    if study is None or not seeds:
        return [n.NOT_RUN, *[w.ABSENT] * 3], {}
    first, second = (study.losses(arm, measure, seeds) for arm in (control, candidate))
    if not n.known([*first, *second]):
        return [n.DIVERGED, *[w.ABSENT] * 3], {}
    found, share = paired(first, second), n.relative_pairs(first, second)
    cells = [
        w.signed(found.mean),
        w.percent(share.mean),
        n.percent_interval(share.low, share.high),
        f"{share.wins} of {len(seeds)}",
    ]
    each = [w.signed(difference) for difference in found.differences]
    return cells, dict(zip(seeds, each, strict=True))
