"""Which rate to take: AdamW's own in Go-MUON, and how sensitive the defaults are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gomuon.lab import formatting as w
from gomuon.lab.experiments.rate_plans import (
    DEFAULTS,
    NANOGPT,
    NANOGPT_RATES,
    SENSITIVE_TASKS,
)
from tools.evidence.campaign_list import TITLES
from tools.evidence.estimates import all_finite, relative_pairs
from tools.evidence.markdown_tables import (
    NOT_RUN,
    code,
    lower_or_higher,
    percent_interval,
    table,
    text,
)
from tools.evidence.studies import HELD_OUT, Evidence, Study, score

PAPERS = "m0.8-0.08"  # the paper's momentum and rate
MARGIN = 0.01  # what another pair must gain before it replaces them


def section(evidence: Evidence) -> list[str]:
    return [
        "### Does AdamW's rate carry over?",
        *_carried_over(evidence.get(NANOGPT.experiment)),
        "### Which rate and momentum suit most tasks?",
        *_defaults(evidence),
    ]


# ---- AdamW's rate --------------------------------------------------------------------------------


def _carried_over(study: Study | None) -> list[str]:
    """Each of AdamW's rates in both methods; the rule is about AdamW's best."""
    about = (
        "nanoGPT's recipe for small machines: one rate, decay and schedule for all parameters, "
        f'gradients clipped, and `lr_scale="adamw"` in Go-MUON ({code(NANOGPT.experiment)}). The '
        "loss is that of the whole held-out text after the last update."
    )
    if study is None or study.shortcoming is not None:
        return [about, f"{NOT_RUN if study is None else study.shortcoming}."]
    rows, best = [], best_adamw_rate(study)
    for rate in NANOGPT_RATES:
        first, second = held_out(study, rate)
        if not all_finite([*first, *second]):
            rows.append([f"{rate:g}", *[w.ABSENT] * 5])
            continue
        pairs = relative_pairs(first, second)
        rows.append(
            [
                f"{rate:g}" + (" (AdamW's best)" if rate == best else ""),
                w.loss(math.fsum(first) / len(first)),
                w.loss(math.fsum(second) / len(second)),
                w.percent(pairs.mean),
                percent_interval(pairs.low, pairs.high),
                f"{pairs.wins} of {len(pairs.differences)}",
            ]
        )
    heads = ("rate", "AdamW", "Go-MUON", "relative", "95 % interval", "lower on")
    return [about, table(heads, rows), _sentence(study, best)]


def held_out(study: Study, rate: float) -> tuple[list[float], list[float]]:
    """AdamW's and Go-MUON's losses on held-out text at a rate, by seed."""
    seeds = study.campaign.seeds
    first, second = (
        study.losses(f"{name}-{rate:g}", HELD_OUT, seeds) for name in ("adamw", "go-muon")
    )
    return first, second


def best_adamw_rate(study: Study) -> float | None:
    """The rate with AdamW's lowest mean; None if every rate diverged."""
    means = {
        rate: math.fsum(losses) / len(losses)
        for rate in NANOGPT_RATES
        if all_finite(losses := held_out(study, rate)[0])
    }
    return min(means, key=lambda rate: means[rate]) if means else None


def _sentence(study: Study, best: float | None) -> str:
    if best is None:
        return "Every rate of AdamW diverged."
    first, second = held_out(study, best)
    if not all_finite(second):
        return f"At AdamW's best rate, {best:g}, a run of Go-MUON diverged."
    pairs = relative_pairs(first, second)
    return (
        f"At AdamW's best rate, {best:g}, Go-MUON is {lower_or_higher(pairs.mean)}, on "
        f"{pairs.wins} of {len(pairs.differences)} seeds lower."
    )


# ---- the defaults --------------------------------------------------------------------------------


def _defaults(evidence: Evidence) -> list[str]:
    """Every pair of rate and momentum on every task, in units of the task's best."""
    about = (
        "Go-MUON with its defaults otherwise; AdamW's part keeps the task's own rate. Each cell is "
        "the task's statistic (the geometric mean of the windows, the held-out loss of nanoGPT's "
        "recipe, the grok step of modular addition), averaged over seeds, above the best pair's. "
        "The rule, declared before the runs: the pair with the lowest geometric mean over the "
        "tasks is the default, and the paper's .08 and .8 stay unless another is more than 1 % "
        "below them."
    )
    found = {task: _statistics(evidence.get(f"defaults-{task}")) for task in SENSITIVE_TASKS}
    rows = []
    for arm in DEFAULTS[0].arms:
        cells = [_above_best(found[task], arm.name) for task in SENSITIVE_TASKS]
        total = over_tasks(found, arm.name)
        rows.append([text(arm.title), *cells, w.ABSENT if total is None else w.percent(total - 1)])
    heads = ("arm", *(TITLES[task] for task in SENSITIVE_TASKS), "all tasks")
    return [about, table(heads, rows), _chosen(found)]


Statistics = Mapping[str, float]


def _statistics(study: Study | None) -> Statistics | None:
    """The mean statistic of every arm, infinite if a seed diverged; None if not all has run."""
    if study is None or study.shortcoming is not None:
        return None
    means = {}
    for arm in study.campaign.arms:
        scores = [score(run) for run in arm.finished.values()]
        known = [one for one in scores if one is not None]
        means[arm.name] = math.inf if len(known) < len(scores) else math.fsum(known) / len(known)
    return means


def _best(means: Statistics) -> float:
    """The lowest statistic of a pair of rate and momentum; decay is no candidate."""
    return min(mean for name, mean in means.items() if name.startswith("m"))


def _above_best(means: Statistics | None, arm: str) -> str:
    if means is None:
        return NOT_RUN
    share = means[arm] / _best(means) - 1
    return w.percent(share) if math.isfinite(share) else "diverged"


def over_tasks(found: Mapping[str, Statistics | None], arm: str) -> float | None:
    """The geometric mean over tasks of an arm's statistic over the task's best."""
    shares = [means[arm] / _best(means) for means in found.values() if means is not None]
    if len(shares) < len(found):
        return None
    return math.exp(math.fsum(map(math.log, shares)) / len(shares))


def _chosen(found: Mapping[str, Statistics | None]) -> str:
    totals = {
        arm.name: (arm.title, total)
        for arm in DEFAULTS[0].arms
        if arm.name.startswith("m") and (total := over_tasks(found, arm.name)) is not None
    }
    if not totals:
        return ""
    name = min(totals, key=lambda arm: totals[arm][1])
    title, total = totals[name]
    papers = totals[PAPERS][1]
    if name == PAPERS:
        return "The paper's pair has the lowest mean, so it stays the default."
    gain = 1 - total / papers
    stays = "so the paper's pair stays" if gain <= MARGIN else "so the rule asks for it"
    return f"The lowest mean has {text(title)}, {100 * gain:.2f} % below the paper's pair, {stays}."
