"""The paper's figures beside ours, experiment by experiment."""

from __future__ import annotations

from collections.abc import Sequence

from gomuon.lab import wording as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.reading import TRAJECTORY, Study, measured
from gomuon.lab.evidence.tables import table, text
from gomuon.lab.evidence.timings import Timing
from gomuon.lab.experiments import EXPERIMENTS
from gomuon.lab.paper_figures import PaperFigures
from gomuon.lab.plans import Arm, Plan
from gomuon.lab.runs import Run
from gomuon.lab.statistics import paired, window_name

# Differences that the text prints; the others follow from the means of its tables.
PRINTED = {
    ("ptb", "501-600"): 0.00083,
    ("lazy", "501-600"): -0.00119,
    ("lazy", "901-1000"): -0.00320,
}
FIGURES = ("measure", "paper", "here", "95 % interval", "here against paper")
STEPS = {"train_99_step": "training 99 %", "grok_step": "held-out 99 %", "delay": "delay"}
PAIRS = ("measure", "difference", "relative", "95 % interval", "lower on", "paper", "paper's pairs")


def figures_of(name: str) -> PaperFigures:
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
        ]
    for control, candidate in plan.comparisons:
        titles = {arm.name: arm.title for arm in plan.arms}
        blocks += [
            f"{text(titles[candidate])} minus {text(titles[control])}, paired by seed; negative "
            "means lower loss. Relative figures and their interval are in units of the control's "
            "mean.",
            table(PAIRS, _pair_rows(name, control, candidate, measures(plan), study)),
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


def _pair_rows(
    name: str, control: str, candidate: str, names: Sequence[str], study: Study | None
) -> list[list[str]]:
    rows = []
    wins = figures_of(name).wins
    for measure in names:
        share = printed_share(name, control, candidate, measure)
        a, b = (printed(name, arm, measure) for arm in (control, candidate))
        difference = PRINTED.get((name, measure), None if a is None or b is None else b - a)
        paper = (
            w.ABSENT
            if share is None or difference is None
            else f"{w.signed(difference)}, {w.percent(share)}"
        )
        beside = [paper, wins.get(measure, w.ABSENT).replace("/", " of ")]
        rows.append([shown(measure), *_pair(study, control, candidate, measure), *beside])
    return rows


def _pair(study: Study | None, control: str, candidate: str, measure: str) -> list[str]:
    if study is None or not study.has(control, candidate):
        return [n.NOT_RUN, *[w.ABSENT] * 3]
    seeds = study.seeds_of(control, candidate)
    first, second = (study.losses(arm, measure, seeds) for arm in (control, candidate))
    if not seeds:
        return [n.NOT_RUN, *[w.ABSENT] * 3]
    if not n.known([*first, *second]):
        return [n.DIVERGED, *[w.ABSENT] * 3]
    share = n.relative_pairs(first, second)
    return [
        w.signed(paired(first, second).mean),
        w.percent(share.mean),
        n.percent_interval(share.low, share.high),
        f"{share.wins} of {len(seeds)}",
    ]


# ---- modular addition ----------------------------------------------------------------------------


def grokking(study: Study | None) -> list[str]:
    """Table 2 of the paper: when each run fitted its training pairs and when it grokked."""
    plan, paper = EXPERIMENTS["grokking"], figures_of("grokking")
    rows = []
    for arm in sorted(plan.arms, key=lambda arm: arm.group):
        runs = _runs(study, arm.name)
        row = [text(arm.group), text(arm.title)]
        for key in STEPS:
            row += [w.step(paper.grokking.get(arm.name, {}).get(key)), _step(runs, key, plan.steps)]
        rows.append(row)
    heads = [f"{title}, {who}" for title in STEPS.values() for who in ("paper", "here")]
    failures = _retention(study)
    return [
        "Updates until 99 % of the training pairs are right, until the first of five consecutive "
        "evaluations with 99 % of the held-out pairs right, and from one to the other. One seed "
        "per modulus, as in the paper, so there is no interval.",
        table(("modulus", "arm", *heads), rows, left=2),
        "How many times as many updates Muon takes to grok, at the rates the paper selected.",
        table(("modulus", "paper", "here"), _speedups(study)),
        *([] if failures is None else [failures]),
    ]


def _speedups(study: Study | None) -> list[list[str]]:
    rows = []
    for control, candidate in EXPERIMENTS["grokking"].comparisons:
        group = next(arm.group for arm in EXPERIMENTS["grokking"].arms if arm.name == control)
        here = n.NOT_RUN
        if study is not None and study.has(control, candidate):
            seeds = study.seeds_of(control, candidate)
            here = ", ".join(_speedup(study, control, candidate, seed) for seed in seeds) or here
        printed_ratio = figures_of("grokking").gains[f"{group} speedup"]
        rows.append([text(group), f"{printed_ratio:.1f}×", here])
    return rows


def _speedup(study: Study, control: str, candidate: str, seed: int) -> str:
    muon, go = (study.grok_steps(arm)[seed] for arm in (control, candidate))
    if go is None:
        return "Go-MUON does not grok"
    return f"over {study.campaign.steps / go:.1f}×" if muon is None else f"{muon / go:.1f}×"


def _runs(study: Study | None, arm: str) -> list[Run]:
    if study is None or not study.has(arm):
        return []
    return list(study.arm(arm).finished.values())


def _step(runs: Sequence[Run], key: str, steps: int) -> str:
    if not runs:
        return n.NOT_RUN
    values = [(run.result or {}).get(key) for run in runs]
    never = w.ABSENT if key == "delay" else f"not within {steps:,}"
    return ", ".join(never if value is None else f"{value:,}" for value in values)


def _retention(study: Study | None) -> str | None:
    """Which runs left the 99 % again after they had grokked."""
    if study is None:
        return None
    lines = []
    for arm in study.campaign.arms:
        for run in arm.finished.values():
            failures = (run.result or {}).get("retention_failures") or []
            if failures:
                lines.append(
                    f"{text(arm.title)} at {text(arm.group)} ({w.many(len(failures), 'evaluation')}"
                    f", last at update {failures[-1]:,})"
                )
    if not lines:
        return "No run fell below 99 % again at an evaluation after it had grokked."
    return f"Below 99 % again after having grokked: {'; '.join(lines)}."


# ---- step time and alignment ---------------------------------------------------------------------


def step_time(study: Study | None) -> str:
    """The ratio of whole-step times beside the paper's."""
    paper = figures_of("lazy").gains["step-time ratio"]
    timing = None if study is None else Timing.of(study)
    row = [n.NOT_RUN, *[w.ABSENT] * 3]
    if timing is not None:
        found = timing.ratio("refresh-1", "lazy-4")
        if found is not None:
            row = [
                w.ratio(found.mean),
                n.plain_interval(found.low, found.high, 3),
                w.ABSENT if found.spread is None else f"×/÷ {found.spread:.3f}",
                f"{found.cycles}",
            ]
    columns = ("whole step, K=4 over K=1", "paper", "here", "95 % interval", "spread", "cycles")
    return table(columns, [["geometric mean", w.ratio(paper), *row]])


def alignment(study: Study | None) -> str:
    """Steps that opposed their source or their gradient, which the runs counted."""
    rows = []
    for arm in EXPERIMENTS["lazy"].arms:
        counts = [] if study is None else alignment_counts(study, arm.name)
        cells = [
            ", ".join(str(pair[side]) for pair in counts) if counts else n.NOT_RUN
            for side in (0, 1)
        ]
        rows.append([text(arm.title), "0", cells[0], "0", cells[1]])
    columns = ("arm", "source, paper", "source, here", "gradient, paper", "gradient, here")
    return table(columns, rows)


def alignment_counts(study: Study, arm: str) -> list[tuple[int, int]]:
    """Per seed, negative source and negative gradient alignments; only where they were counted."""
    if not study.has(arm):
        return []
    results = [run.result or {} for run in study.arm(arm).finished.values()]
    return [
        (int(result["negative_source"]), int(result["negative_gradient"]))
        for result in results
        if "negative_source" in result and "negative_gradient" in result
    ]
