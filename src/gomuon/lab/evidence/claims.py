"""The paper's claims, each with a verdict by a stated rule and a reason made of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gomuon.functional import theory
from gomuon.lab import paper_figures as paper
from gomuon.lab import wording as w
from gomuon.lab.campaign import screen
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.beside import (
    alignment_counts,
    printed,
    printed_share,
    shown,
)
from gomuon.lab.evidence.reading import TRAJECTORY, Evidence, Study, measured
from gomuon.lab.evidence.tables import code, text
from gomuon.lab.evidence.timings import Timing
from gomuon.lab.experiments import EXPERIMENTS
from gomuon.lab.statistics import window_name

Verdict = Literal["reproduced", "qualified", "not reproduced", "not run yet"]
Finding = tuple[Verdict, str]

CLOSE = 0.01  # a window mean this near to the paper's counts as the same
SOON, TIMES = 400, 5  # updates within which Go-MUON groks, and how many times as many Muon takes
SAVING = (0.15, 0.25)  # what "about 20 %" may be
FIT = 0.1  # by how much two fitting times may differ and still be nearly the same


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words.

    Attributes:
        words: what is claimed.
        campaign: the folder that decides; "" for what tests hold.
        rule: when the verdict is "reproduced", and when "qualified".
        judge: the verdict and its reason, from a whole campaign.
        tests: for theory, the tests that hold it.
    """

    words: str
    campaign: str
    rule: str
    judge: Callable[[Study], Finding] | None = None
    tests: tuple[str, ...] = ()

    def finding(self, evidence: Evidence) -> Finding:
        if self.judge is None:
            return "reproduced", f"{theory_numbers(self)}held by {_held_by(self.tests)}"
        study = evidence.get(self.campaign)
        if study is None:
            return "not run yet", f"{code(self.campaign)} is not there"
        if study.shortcoming is not None:
            return "not run yet", f"{code(self.campaign)}: {study.shortcoming}"
        return self.judge(study)


# ---- theory --------------------------------------------------------------------------------------

ORACLE = "tests/functional/test_oracle.py"
THEORY = "tests/functional/test_theory.py"


def _held_by(tests: Sequence[str]) -> str:
    """The tests, file by file."""
    files: dict[str, list[str]] = {}
    for test in tests:
        path, _, name = test.partition("::")
        files.setdefault(path, []).append(code(name))
    return "; ".join(f"{w.listing(names)} in {code(path)}" for path, names in files.items())


def theory_numbers(claim: Claim) -> str:
    """For the claim about sparse averages, its numbers at the paper's β_B and K."""
    if not claim.words.startswith("Refreshing every fourth"):
        return ""
    ratio = theory.sparse_variance_ratio(0.97, 4)
    lags = [theory.sparse_lag(0.97, every) for every in (4, 1)]
    return (
        f"at β_B = .97 the variance grows {ratio:.5f} times and the lag is {lags[0]:.4f} against "
        f"{lags[1]:.4f} steps, the paper's own figures; "
    )


# ---- the corpora ---------------------------------------------------------------------------------


def _lower_trajectory(
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


def _lower_window(
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


def _tuning_seed(study: Study) -> Finding:
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


def _step_time(study: Study) -> Finding:
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


def _aligned(study: Study) -> Finding:
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


def _groks(modulus: int) -> Callable[[Study], Finding]:
    def judge(study: Study) -> Finding:
        names = (f"p{modulus}-go-muon-0.08", f"p{modulus}-muon-0.16")
        go, muon = (next(iter(study.grok_steps(name).values())) for name in names)
        published = [paper.GROKKING.grokking[name]["grok_step"] for name in names]
        steps = study.campaign.steps
        reason = f"Go-MUON {_at(go, steps)}, Muon {_at(muon, steps)}"
        if go is not None and muon is not None:
            reason += f", {muon / go:.1f} times as many"
        reason += f" (paper {published[0]:,} and {published[1]:,}); one seed"
        if go is None or (muon is not None and muon <= go):
            return "not reproduced", reason
        enough = go <= SOON and (muon is None or muon >= TIMES * go)
        return ("reproduced" if enough else "qualified"), reason

    return judge


def _groks_words(modulus: int) -> str:
    names = (f"p{modulus}-go-muon-0.08", f"p{modulus}-muon-0.16")
    go, muon = (paper.GROKKING.grokking[name]["grok_step"] for name in names)
    return (
        f"Modular addition, p = {modulus}: sustained 99 % at update {go:,}, against {muon:,} "
        "with Muon."
    )


def _at(step: int | None, steps: int) -> str:
    return f"not within {steps:,} updates" if step is None else f"at update {step:,}"


def _screen(study: Study) -> Finding:
    found = screen(study.runs)
    wanted = {"go-muon": 0.08, "muon": 0.16}
    same = [name for name, rate in wanted.items() if found[name]["rate"] == rate]
    reason = "; ".join(
        f"{name}: {found[name]['rate']:g} (paper {rate:g}), sums of grok steps "
        + w.listing([f"{total:,} at {at}" for at, total in found[name]["scores"].items()])
        for name, rate in wanted.items()
    )
    verdicts: tuple[Verdict, ...] = ("not reproduced", "qualified", "reproduced")
    return verdicts[len(same)], reason


def _fits_alike(study: Study) -> Finding:
    parts, alike = [], 0
    for modulus in (103, 107):
        names = (f"p{modulus}-muon-0.16", f"p{modulus}-go-muon-0.08")
        results = [next(iter(study.arm(name).finished.values())).result or {} for name in names]
        muon, go = (result["train_99_step"] for result in results)
        published = [paper.GROKKING.grokking[name]["train_99_step"] for name in names]
        alike += muon is not None and go is not None and abs(go - muon) <= FIT * muon
        parts.append(
            f"p={modulus}: {w.step(muon)} with Muon, {w.step(go)} with Go-MUON "
            f"(paper {published[0]} and {published[1]})"
        )
    verdicts: tuple[Verdict, ...] = ("not reproduced", "qualified", "reproduced")
    return verdicts[alike], "; ".join(parts)


# ---- the lists -----------------------------------------------------------------------------------

TRAJECTORY_RULE = (
    "reproduced if Go-MUON is lower {what} and all six window means are within "
    f"{100 * CLOSE:g} % of the paper's; qualified if it is lower in the mean"
)
WINDOW_RULE = "reproduced if lower on every pair; qualified if lower in the mean"
GROKS_RULE = (
    f"reproduced if Go-MUON groks within {SOON} updates and Muon takes at least {TIMES} times as "
    "many or does not grok; qualified if Go-MUON is first"
)

ABSTRACT: tuple[Claim, ...] = (
    Claim(
        "With any positive-definite maps, however estimated and however old, the raw update solves "
        "the weighted spectral problem exactly.",
        "",
        "property tests over random maps, sources and shapes",
        tests=(
            f"{ORACLE}::test_the_value_is_the_nuclear_norm_of_C",
            f"{ORACLE}::test_the_direction_touches_the_unit_ball",
            f"{ORACLE}::test_no_feasible_point_does_better",
            f"{THEORY}::test_a_cached_direction_keeps_its_share",
        ),
    ),
    Claim(
        "For softmax cross-entropy the observed-label factor differs from the Fisher factor by a "
        "bound in the distance of prediction and data.",
        "",
        "property tests against expectations summed label by label",
        tests=(
            f"{THEORY}::test_the_factor_mismatch_is_the_difference_of_expectations",
            f"{THEORY}::test_a_hidden_layer_multiplies_the_bound_by_its_jacobian",
        ),
    ),
    Claim(
        "Refreshing every fourth step hardly changes the delay of slow geometry and makes "
        "stationary factors noisier.",
        "",
        "the paper's numbers, and tests that unroll the recursion",
        tests=(
            f"{THEORY}::test_the_papers_numbers",
            f"{THEORY}::test_sparse_averages_from_the_weights_of_the_recursion",
        ),
    ),
    Claim(
        "Penn Treebank: Go-MUON lowers the geometric mean of three windows by "
        f"{paper.PTB.gains[TRAJECTORY]:.2f} % over three paired seeds.",
        "ptb",
        TRAJECTORY_RULE.format(what="on every pair"),
        _lower_trajectory("ptb", "muon", "go-muon", every_window=False),
    ),
    Claim(
        f"Tiny Shakespeare: by {paper.SHAKESPEARE.gains[TRAJECTORY]:.2f} % against the registered "
        "Muon control, of which ours is a reading.",
        "shakespeare",
        TRAJECTORY_RULE.format(what="on every seed and window"),
        _lower_trajectory("shakespeare", "muon-qk", "go-muon", every_window=True),
    ),
    Claim(
        "Penn Treebank: refreshing every fourth step lowers the late window.",
        "lazy",
        WINDOW_RULE,
        _lower_window("lazy", "refresh-1", "lazy-4", "901-1000"),
    ),
    Claim(
        "Refreshing every fourth step takes about 20 % less time per step.",
        "lazy",
        f"reproduced if the saving is {100 * SAVING[0]:g} to {100 * SAVING[1]:g} %; qualified if there is "
        "any",
        _step_time,
    ),
    Claim(
        _groks_words(103),
        "grokking",
        GROKS_RULE,
        _groks(103),
    ),
    Claim(
        _groks_words(107),
        "grokking",
        GROKS_RULE,
        _groks(107),
    ),
)

FURTHER: tuple[Claim, ...] = (
    Claim(
        "Penn Treebank: matched map-back is lower than the halfspace baseline, of which ours is a "
        f"reading, in 201–300 by {paper.MAPBACK.gains['201-300']:.2f} % on all four pairs.",
        "mapback",
        WINDOW_RULE,
        _lower_window("mapback", "halfspace", "go-muon", "201-300"),
    ),
    Claim(
        "Neither K=1 nor K=4 records a step against its momentum source or its gradient.",
        "lazy",
        "reproduced if there is none of either; qualified if there is none against the source",
        _aligned,
    ),
    Claim(
        f"Tiny Shakespeare, tuning seed {EXPERIMENTS['shakespeare'].tuning_seed}: by "
        f"{paper.SHAKESPEARE.gains['tuning seed, geometric mean']:.2f} %.",
        "shakespeare",
        f"reproduced if lower and both means are within {100 * CLOSE:g} % of the paper's; qualified if "
        "lower",
        _tuning_seed,
    ),
    Claim(
        "Modular addition: the screen selects .08 for Go-MUON and .16 for Muon.",
        "grokking",
        "reproduced if both rates are selected; qualified if one is",
        _screen,
    ),
    Claim(
        "Modular addition: training pairs are fitted at nearly the same update.",
        "grokking",
        f"reproduced if the two differ by at most {100 * FIT:g} % at both moduli; qualified at one",
        _fits_alike,
    ),
)
