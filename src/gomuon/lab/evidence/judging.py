"""The rules by which claims are judged: numbers in, a verdict and its reason out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.beside import printed, printed_share, shown
from gomuon.lab.evidence.reading import TRAJECTORY, Study, measured
from gomuon.lab.evidence.steps import alignment_counts
from gomuon.lab.evidence.tables import text
from gomuon.lab.evidence.timings import Timing
from gomuon.lab.experiments import published as paper
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.results.candidates import screen
from gomuon.lab.results.statistics import GROK_THRESHOLD

Verdict = Literal["reproduced", "qualified", "not reproduced", "not run yet"]
Finding = tuple[Verdict, str]

CLOSE = 0.01  # a window mean this near to the paper's counts as the same
SOON, TIMES = 400, 5  # updates within which Go-MUON groks, and how many times as many Muon takes
SAVING = (0.15, 0.25)  # what "about 20 %" may be
# Per modulus Muon and Go-MUON at the rates the paper selected.
SELECTED = dict(zip((103, 107), EXPERIMENTS["grokking"].comparisons, strict=True))
FIT = 0.1  # by how much two fitting times may differ and still be nearly the same


# ---- the corpora ---------------------------------------------------------------------------------


def lower_trajectory(
    name: str, control: str, candidate: str, *, every_window: bool
) -> Callable[[Study], Finding]:
    """Lower on every pair, with every window mean near the paper's."""

    def judge(study: Study) -> Finding:
        plan, seeds = EXPERIMENTS[name], list(study.campaign.seeds)
        windows = [window_name(window) for window in plan.windows]
        first, second = (study.losses(arm, TRAJECTORY, seeds) for arm in (control, candidate))
        if not n.known([*first, *second]):
            return "not reproduced", "a run diverged"
        share = n.relative_pairs(first, second)
        pairs = [(measure, seed) for measure in windows for seed in seeds]
        if not every_window:
            pairs = [(TRAJECTORY, seed) for seed in seeds]
        won = sum(
            study.losses(candidate, measure, [seed])[0] < study.losses(control, measure, [seed])[0]
            for measure, seed in pairs
        )
        far = _deviations(study, name, (control, candidate), windows)
        close = [entry for entry in far if abs(entry[0]) <= CLOSE]
        what = "seed and window pairs" if every_window else "pairs"
        published = printed_share(name, control, candidate, TRAJECTORY)
        reason = (
            f"{n.lower_or_higher(share.mean)} than {text(_title(name, control))} "
            f"(95 % interval {n.percent_interval(share.low, share.high)}; paper "
            f"{n.lower_or_higher(published or 0.0)}), lower in {won} of {len(pairs)} {what}; "
            f"{len(close)} of {len(far)} window means within {100 * CLOSE:g} % of the paper's, "
            f"the farthest {_farthest(far)}"
        )
        if not n.told_apart(share):
            reason += f"; {len(seeds)} pairs alone cannot tell the gain from none"
        for other in plan.comparisons:
            if other != (control, candidate):
                reason += f"; {_against(study, *other)}"
        if share.mean >= 0:
            return "not reproduced", reason
        whole = won == len(pairs) and len(close) == len(far)
        return ("reproduced" if whole else "qualified"), reason

    return judge


def _against(study: Study, control: str, candidate: str) -> str:
    """A comparison the paper does not have."""
    seeds = list(study.campaign.seeds)
    first, second = (study.losses(arm, TRAJECTORY, seeds) for arm in (control, candidate))
    if not n.known([*first, *second]):
        return f"{text(study.arm(control).label)} diverged"
    share = n.relative_pairs(first, second)
    return (
        f"{n.lower_or_higher(share.mean)} than {text(study.arm(control).label)} (95 % interval "
        f"{n.percent_interval(share.low, share.high)}), which the paper does not have"
    )


Deviation = tuple[float, str, str]


def _deviations(
    study: Study, name: str, arms: Sequence[str], windows: Sequence[str]
) -> list[Deviation]:
    """How far each mean over seeds is from the paper's: share, arm and window."""
    found = []
    for arm in arms:
        for window in windows:
            published = printed(name, arm, window)
            values = study.losses(arm, window, list(study.campaign.seeds))
            if published is not None:
                share = n.relative(n.estimate(values).mean, published)
                found.append((share, _title(name, arm), shown(window)))
    return found


def _farthest(found: Sequence[Deviation]) -> str:
    share, title, window = max(found, key=lambda entry: abs(entry[0]))
    return f"{text(title)}, {window}: {w.percent(share)}"


def _title(name: str, arm: str) -> str:
    return next(a.title for a in EXPERIMENTS[name].arms if a.name == arm)


def lower_window(
    name: str, control: str, candidate: str, window: str
) -> Callable[[Study], Finding]:
    """Lower in one window on every pair."""

    def judge(study: Study) -> Finding:
        seeds = list(study.campaign.seeds)
        first, second = (study.losses(arm, window, seeds) for arm in (control, candidate))
        if not n.known([*first, *second]):
            return "not reproduced", "a run diverged"
        share = n.relative_pairs(first, second)
        published = printed_share(name, control, candidate, window)
        reason = (
            f"{n.lower_or_higher(share.mean)} in {shown(window)} (95 % interval "
            f"{n.percent_interval(share.low, share.high)}; paper "
            f"{n.lower_or_higher(published or 0.0)}), lower on {share.wins} of {len(seeds)} pairs"
        )
        if share.mean >= 0:
            return "not reproduced", reason
        return ("reproduced" if share.wins == len(seeds) else "qualified"), reason

    return judge


def tuning_seed(study: Study) -> Finding:
    runs = {run.config.arm: run for run in study.campaign.tuning}
    names = ("muon-qk-lr0.018", "go-muon-lr0.08")
    values = [measured(runs[name], TRAJECTORY) for name in names]
    if not n.known(values):
        return "not reproduced", "a run diverged"
    theirs = [printed("shakespeare", name, TRAJECTORY) or 0.0 for name in names]
    share, published = n.relative(values[1], values[0]), n.relative(theirs[1], theirs[0])
    far = [n.relative(value, figure) for value, figure in zip(values, theirs, strict=True)]
    reason = (
        f"{n.lower_or_higher(share)} on the tuning seed (paper {n.lower_or_higher(published)}); "
        f"the two means are {w.listing([w.percent(x) for x in far])} from the paper's"
    )
    if share >= 0:
        return "not reproduced", reason
    return ("reproduced" if all(abs(x) <= CLOSE for x in far) else "qualified"), reason


# ---- step time and alignment ---------------------------------------------------------------------


def step_time(study: Study) -> Finding:
    timing = Timing.of(study)
    found = None if timing is None else timing.ratio("refresh-1", "lazy-4")
    if found is None:
        return "not run yet", "the steps were not timed"
    spread = "" if found.spread is None else f", a cycle's spread a factor of {found.spread:.3f}"
    interval = n.plain_interval(found.low, found.high, 3)
    published = paper.LAZY.gains["step-time ratio"]
    reason = (
        f"a whole step at K=4 takes {w.ratio(found.mean)} the time of one at K=1 (95 % interval "
        f"{interval}{spread}, {w.many(found.cycles, 'cycle')}; paper {w.ratio(published)})"
    )
    if not found.mean < 1:
        return "not reproduced", reason
    low, high = SAVING
    return ("reproduced" if low <= 1 - found.mean <= high else "qualified"), reason


def aligned(study: Study) -> Finding:
    counts = {arm.name: alignment_counts(study, arm.name) for arm in EXPERIMENTS["lazy"].arms}
    if not all(len(found) == len(study.campaign.seeds) for found in counts.values()):
        return "not run yet", "the runs did not count alignments"
    source, gradient = (
        sum(pair[side] for found in counts.values() for pair in found) for side in (0, 1)
    )
    runs = sum(len(found) for found in counts.values())
    reason = f"{source:,} against the source and {gradient:,} against the gradient in {runs} runs"
    if source:
        return "not reproduced", reason
    return ("qualified" if gradient else "reproduced"), reason


# ---- modular addition ----------------------------------------------------------------------------


def groks(modulus: int) -> Callable[[Study], Finding]:
    def judge(study: Study) -> Finding:
        names = SELECTED[modulus]
        results = [_only(study, name) for name in names]
        muon, go = (result["grok_step"] for result in results)
        published = [paper.GROKKING.grokking[name]["grok_step"] for name in names]
        steps = study.campaign.steps
        reason = f"Go-MUON {_at(go, steps)}, Muon {_at(muon, steps)}"
        if go is not None and muon is not None:
            reason += f", {muon / go:.1f} times as many"
        reason += f" (paper {published[1]:,} and {published[0]:,}); one seed"
        lost, ends = results[1]["retention_failures"], [r["final_test_accuracy"] for r in results]
        if lost:
            reason += f"; Go-MUON is below 99 % at {w.many(len(lost), 'later evaluation')}"
        muon_end, go_end = (w.accuracy(end, 2) for end in ends)
        reason += f"; in the end {go_end} with Go-MUON and {muon_end} with Muon"
        if go is None or (muon is not None and muon <= go):
            return "not reproduced", reason
        first = go <= SOON and (muon is None or muon >= TIMES * go)
        stayed = ends[1] is not None and ends[1] >= GROK_THRESHOLD
        return ("reproduced" if first and stayed else "qualified"), reason

    return judge


def _only(study: Study, arm: str) -> dict[str, Any]:
    """The result of an arm with one run."""
    return next(iter(study.arm(arm).finished.values())).result or {}


def _at(step: int | None, steps: int) -> str:
    return f"not within {steps:,} updates" if step is None else f"at update {step:,}"


def screened(study: Study) -> Finding:
    found = screen(study.runs)
    wanted = {"go-muon": 0.08, "muon": 0.16}
    same = [name for name, rate in wanted.items() if found[name]["rate"] == rate]
    reason = "; ".join(
        f"{name}: {found[name]['rate']:g} (paper {rate:g}), sums of grok steps "
        + w.listing([f"{total:,} at {at}" for at, total in found[name]["scores"].items()])
        for name, rate in wanted.items()
    )
    if any(run.result is not None and run.result["grok_step"] is None for run in study.runs):
        reason += f"; a run that never groks counts as {study.campaign.steps + 1:,}"
    verdicts: tuple[Verdict, ...] = ("not reproduced", "qualified", "reproduced")
    return verdicts[len(same)], reason


def fits_alike(study: Study) -> Finding:
    parts, alike = [], 0
    for modulus, names in SELECTED.items():
        muon, go = (_only(study, name)["train_99_step"] for name in names)
        published = [paper.GROKKING.grokking[name]["train_99_step"] for name in names]
        alike += muon is not None and go is not None and abs(go - muon) <= FIT * muon
        parts.append(
            f"p={modulus}: {w.step(muon)} with Muon, {w.step(go)} with Go-MUON "
            f"(paper {published[0]} and {published[1]})"
        )
    verdicts: tuple[Verdict, ...] = ("not reproduced", "qualified", "reproduced")
    return verdicts[alike], "; ".join(parts)
