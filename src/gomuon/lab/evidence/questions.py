"""What the paper leaves open and the runs can answer: a table each, and a sentence by rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence import repeats
from gomuon.lab.evidence.reading import (
    TRAJECTORY,
    Evidence,
    Study,
    grokked_at,
    held_out_at_end,
)
from gomuon.lab.evidence.slots import CORPORA, TASKS
from gomuon.lab.evidence.tables import code, table, text
from gomuon.lab.experiments import optimizers, schedules
from gomuon.lab.results.runs import Run
from gomuon.lab.results.statistics import GROK_THRESHOLD, Paired

Comparison = tuple[str, str, str]  # campaign, control, candidate
PAIRS = ("campaign", "arm", "against", "relative", "95 % interval", "lower on")


def section(evidence: Evidence) -> list[str]:
    return [
        "Relative differences of the geometric mean of the windows, paired by seed; negative means "
        "lower loss. A difference counts as told apart when its 95 % interval leaves zero out. "
        "Each interval is for itself: of twenty comparisons without a difference one would be told "
        "apart by chance, and small ones below may be such.",
        "### How much of the Shakespeare gain survives a tuned plain Muon?",
        *_shakespeare(evidence),
        "### Does the sweep's length hold Muon back in the races?",
        "A sweep is shorter than its race, and what is best for a short run may be too high for a "
        "longer one. Here Muon has lower rates on the seeds and over the updates of the race; "
        "Go-MUON keeps the rate it raced with. Both rates were set down after the races had run, "
        "so to take the better of them is to favour Muon.",
        *_compared(
            evidence,
            [
                comparison
                for task in CORPORA
                for comparison in (
                    (f"race-{task}", "muon", "go-muon"),
                    (f"muon-rate-{task}", "muon-0.04", "go-muon"),
                    (f"muon-rate-{task}", "muon-0.02", "go-muon"),
                )
            ],
        ),
        "### Input side or output side?",
        *_compared(
            evidence,
            [
                ("ablations", "k4", "input-only"),
                ("ablations", "k4", "output-only"),
                ("ablations", "output-only", "input-only"),
                ("race-ptb", "go-muon", "go-muon-input"),
                ("race-shakespeare", "go-muon", "go-muon-input"),
            ],
        ),
        "### How often must the geometry be renewed?",
        *_compared(evidence, [("ablations", "k4", "k1"), ("ablations", "k4", "k16")]),
        "### Does an average on A help?",
        *_compared(evidence, [("ablations", "k4", "average-a")]),
        "### Does it matter what the polar factor does in the null space?",
        "The paper completes it; by default we leave it alone. Behind an embedding with fewer "
        "symbols than its width, as here, sources lack rank.",
        *_compared(evidence, [("null-space", "completed", "left-alone")]),
        "### Weight decay in the geometry or plain?",
        *_decay(evidence),
        "### How much does AdamW's rate matter in modular addition?",
        *_adamw_rate(evidence.get("adamw-rate")),
        "### How much does arithmetic alone move a run?",
        *repeats.section(evidence),
    ]


def compare(evidence: Evidence, comparison: Comparison) -> Paired | None:
    """The paired relative difference; None unless the campaign is whole and nothing diverged."""
    name, control, candidate = comparison
    study = evidence.get(name)
    if study is None or study.shortcoming is not None or not study.has(control, candidate):
        return None
    seeds = list(study.campaign.seeds)
    first, second = (study.losses(arm, TRAJECTORY, seeds) for arm in (control, candidate))
    return n.relative_pairs(first, second) if n.known([*first, *second]) else None


def _compared(evidence: Evidence, comparisons: Sequence[Comparison]) -> list[str]:
    rows = [_row(evidence, comparison) for comparison in comparisons]
    return [table(PAIRS, rows, left=3), _sentence(evidence, comparisons)]


def _row(evidence: Evidence, comparison: Comparison) -> list[str]:
    name, control, candidate = comparison
    study, found = evidence.get(name), compare(evidence, comparison)
    titles = [_title(study, arm) for arm in (candidate, control)]
    if found is None:
        return [code(name), *titles, _why(study, control, candidate), w.ABSENT, w.ABSENT]
    return [
        code(name),
        *titles,
        w.percent(found.mean),
        n.percent_interval(found.low, found.high),
        f"{found.wins} of {len(found.differences)}",
    ]


def _title(study: Study | None, arm: str) -> str:
    return text(study.arm(arm).label if study is not None and study.has(arm) else arm)


def _why(study: Study | None, *arms: str) -> str:
    if study is None or not study.has(*arms):
        return n.NOT_RUN
    return study.shortcoming or n.DIVERGED


def _sentence(evidence: Evidence, comparisons: Sequence[Comparison]) -> str:
    """Which of the differences that were measured the seeds tell from none."""
    measured = [(one, found) for one in comparisons if (found := compare(evidence, one))]
    if not measured:
        return ""
    apart = []
    for (name, control, candidate), found in measured:
        if n.told_apart(found):
            study = evidence[name]
            subject, other = (text(study.arm(arm).title) for arm in (candidate, control))
            where = TASKS[study.campaign.task]
            apart.append(f"{subject} is {n.lower_or_higher(found.mean)} than {other} on {where}")
    if not apart:
        return "The seeds tell none of these differences from no difference."
    return f"Told apart, {len(apart)} of {len(measured)}: {'; '.join(apart)}."


def _shakespeare(evidence: Evidence) -> list[str]:
    against: list[Comparison] = [
        ("shakespeare", "muon-qk", "go-muon"),
        ("shakespeare", "muon", "go-muon"),
        ("race-shakespeare", "muon", "go-muon"),
    ]
    rows = [_row(evidence, comparison) for comparison in against]
    blocks = [table(PAIRS, rows, left=3)]
    control, *others = (compare(evidence, comparison) for comparison in against)
    sentences = []
    for (name, _, _), found in zip(against[1:], others, strict=True):
        if found is None:
            continue
        apart = "tell apart" if n.told_apart(found) else "cannot tell from none"
        words = (
            f"Against the plain Muon tuned for {code(name)} Go-MUON is "
            f"{n.lower_or_higher(found.mean)}, which {w.many(len(found.differences), 'pair')} "
            f"{apart}"
        )
        # Only over the same windows is one gain a share of the other.
        if name == against[0][0] and control is not None and control.mean < 0:
            share = max(0.0, found.mean / control.mean)
            words += f": {100 * share:.0f} % of the gain against the Q/K reading"
        sentences.append(f"{words}.")
    return [*blocks, " ".join(sentences)]


def _decay(evidence: Evidence) -> list[str]:
    blocks = _compared(
        evidence,
        [
            ("ablations", "plain-decay", "geometry-decay"),
            ("ablations", "k4", "plain-decay"),
            ("ablations", "k4", "geometry-decay"),
        ],
    )
    study = evidence.get("ablations")
    if study is None or not study.has("plain-decay", "geometry-decay"):
        return blocks
    sums = {name: decay_sum(study, name) for name in ("plain-decay", "geometry-decay")}
    equal = math.isclose(*sums.values(), rel_tol=1e-9)
    listed = w.listing([f"{value:.3f} ({name})" for name, value in sums.items()])
    said = "equal, as it must be to compare them" if equal else "NOT equal, so they do not compare"
    return [*blocks, f"Σ lr·wd over the run is {listed}: {said}."]


def decay_sum(study: Study, name: str) -> float:
    """Σ lr·wd over an arm's run, with the cosine of the corpora."""
    arm = study.arm(name)
    decay = float(arm.options.get("weight_decay", 0.0))
    return (arm.rate or 0.0) * decay * math.fsum(schedules.cosine(study.campaign.steps))


def _adamw_rate(study: Study | None) -> list[str]:
    if study is None:
        return [f"{code('adamw-rate')}: {n.NOT_RUN}."]
    rates: dict[float, dict[str, list[Run]]] = {}
    for arm in study.campaign.arms:
        for run in arm.finished.values():
            of_rate = rates.setdefault(run.config.adamw_lr, {})
            of_rate.setdefault(run.config.optimizer, []).append(run)
    steps = study.campaign.steps
    names = ("muon", "go-muon")
    rows = [
        [f"{rate:g}", *(cell for name in names for cell in _cells(found.get(name, []), steps))]
        for rate, found in sorted(rates.items())
    ]
    heads = ["AdamW's rate"]
    for name in names:
        heads += [f"{optimizers.title(name)}: grok step", "held out at the end"]
    blocks = [
        f"On each of {w.seeds(study.campaign.seeds)}; {w.many(steps, 'update')} each.",
        table(heads, rows),
    ]
    if study.shortcoming is not None:
        return [*blocks, f"{study.shortcoming}."]
    return [*blocks, " ".join(_rate_sentence(rates, name, steps) for name in names)]


def _cells(runs: Sequence[Run], steps: int) -> list[str]:
    """When each run groks, and where it ends."""
    if not runs:
        return [n.NOT_RUN, w.ABSENT]
    steps_taken = [grokked_at(run) for run in runs]
    groks = [f"over {steps:,}" if step is None else f"{step:,}" for step in steps_taken]
    return [", ".join(groks), ", ".join(w.accuracy(held_out_at_end(run)) for run in runs)]


def _rate_sentence(
    rates: Mapping[float, Mapping[str, Sequence[Run]]], name: str, steps: int
) -> str:
    found = [run for of_rate in rates.values() for run in of_rate.get(name, [])]
    grokked = [run for run in found if grokked_at(run) is not None]
    count = f"{len(grokked)} of {len(found)} runs"
    said = f"{optimizers.title(name)} groks within {steps:,} updates in {count}"
    kept = []
    for rate, of_rate in sorted(rates.items()):
        own = [run for run in of_rate.get(name, []) if run in grokked]
        if own:
            held = sum((held_out_at_end(run) or 0.0) >= GROK_THRESHOLD for run in own)
            kept.append(f"{held} of {len(own)} at {rate:g}")
    return f"{said}; of those, {w.listing(kept)} end at 99 % or above." if kept else f"{said}."
